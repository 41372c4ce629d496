"""`python -m specgraph` is the command `specgraph`."""

from specgraph.cli import main

if __name__ == "__main__":  # not in a process that the command starts
    main()

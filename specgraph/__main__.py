"""`python -m specgraph` is the command `specgraph`."""

from specgraph.cli import main

main()

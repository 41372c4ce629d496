"""The command `specgraph`, also as `python -m specgraph_run`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; a Ctrl-C while it is loaded ends it as one later does, with a line and status 130."""
    try:
        from specgraph_run.cli import main

        main()
    except KeyboardInterrupt:
        print("specgraph: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":  # not in a process that the command starts
    main()

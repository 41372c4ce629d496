"""The command `specgraph`, also available as `python -m specgraph_run`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Ctrl-C during its import prints one line and exits with status 130, as it does later."""
    try:
        from specgraph_run.cli import main

        main()
    except KeyboardInterrupt:
        print("specgraph: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":  # false in a process that the command starts
    main()

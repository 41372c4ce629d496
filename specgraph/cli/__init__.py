"""The `specgraph` command, one module per subcommand.

These modules import torch inside their functions only, so that `--help` is fast.
"""

from __future__ import annotations

import sys

import typer

from specgraph.cli.bench import bench
from specgraph.cli.conformance import conformance
from specgraph.cli.explain import explain
from specgraph.cli.generate import generate
from specgraph.cli.new_backend import new_backend
from specgraph.cli.platforms import platforms
from specgraph.errors import SpecgraphError

app = typer.Typer(
    help="Draft speculative tokens through device graphs, on any accelerator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, platforms, explain, bench, conformance, new_backend):
    app.command()(command)


def main() -> None:
    """Entry point: our own errors are one message and exit status 1, not a traceback."""
    try:
        app()
    except SpecgraphError as error:
        print(f"specgraph: {error}", file=sys.stderr)
        sys.exit(1)

"""The `specgraph` command, one module per subcommand.

These modules import torch inside their functions only, so that `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from specgraph.cli.audit import audit
from specgraph.cli.bench import bench
from specgraph.cli.chat import chat
from specgraph.cli.conformance import conformance
from specgraph.cli.env import env
from specgraph.cli.explain import explain
from specgraph.cli.generate import generate
from specgraph.cli.new_backend import new_backend
from specgraph.cli.platforms import platforms
from specgraph.cli.trace import trace
from specgraph.cli.tune import tune
from specgraph.errors import SpecgraphError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for command in (generate, chat, platforms, explain, trace, bench, tune, conformance, audit, env, new_backend):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        from specgraph import __version__

        typer.echo(f"specgraph {__version__}")
        raise typer.Exit


@app.callback()
def specgraph(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Draft speculative tokens through device graphs, on any accelerator."""


def main() -> None:
    """Entry point: an error of ours is one message and exit status 1, without a traceback."""
    try:
        app()
    except SpecgraphError as error:
        rank = os.environ.get("RANK", "0")  # of a process of torchrun
        if rank == "0" or not getattr(error, "everywhere", False):
            print(f"specgraph: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        sys.exit(1)

"""The `specgraph` command, one module per subcommand.

These modules import torch inside their functions only, so that `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from specgraph.cli.audit import audit
from specgraph.cli.bench import bench
from specgraph.cli.chat import chat
from specgraph.cli.conformance import conformance
from specgraph.cli.env import env
from specgraph.cli.explain import explain
from specgraph.cli.generate import generate
from specgraph.cli.new_backend import new_backend
from specgraph.cli.output import write_any_text
from specgraph.cli.platforms import platforms
from specgraph.errors import SpecgraphError


@contextmanager
def _told() -> Generator[None]:
    """End a command that Ctrl-C interrupts with a line and status 130: typer says nothing."""
    try:
        yield
    except KeyboardInterrupt:
        print("specgraph: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


class _Group(TyperGroup):
    """All commands."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _told():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


class _Command(TyperCommand):
    """A command whose `--help` lists options by panel. No name is cut, however narrow the terminal is."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or panel, []).append(record)
        for panel, records in sections.items():
            with formatter.section(panel):
                formatter.write_dl(records)


_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_SETTINGS
)
for command in (generate, chat, platforms, explain, bench, conformance, audit, env, new_backend):
    first = " ".join((command.__doc__ or "").split("\n\n")[0].split())
    app.command(cls=_Command, short_help=first, context_settings=_SETTINGS)(command)  # in full: click would cut it


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


def _let_idle_threads_sleep() -> None:
    """Let idle OpenMP threads wait for some microseconds only, unless the environment says how they wait.

    GNU's OpenMP, which torch's CPU builds bring, reads this when torch is imported. By default a thread that waits
    spins for milliseconds, and where other programs have the cores, it keeps the thread that it waits for from running.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def main() -> None:
    """Entry point: an error of ours is one message and its exit status, without a traceback."""
    _let_idle_threads_sleep()
    write_any_text()
    try:
        app()
    except SpecgraphError as error:
        rank = os.environ.get("RANK", "0")  # of a process of torchrun
        if rank == "0" or not getattr(error, "everywhere", False):
            print(f"specgraph: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:  # a full disk, a name that is too long
        print(f"specgraph: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again at the exit
        sys.exit(1)

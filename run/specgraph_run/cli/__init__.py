"""The `specgraph` command, one module per subcommand.

These modules import torch inside their functions only, so that `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from specgraph.errors import SpecgraphError, first_line
from specgraph_run.cli.audit import audit
from specgraph_run.cli.bench import bench
from specgraph_run.cli.chat import chat
from specgraph_run.cli.draft_vocab import draft_vocab
from specgraph_run.cli.env import env
from specgraph_run.cli.explain import explain
from specgraph_run.cli.generate import generate
from specgraph_run.cli.new_backend import new_backend
from specgraph_run.cli.output import write_any_text
from specgraph_run.cli.platforms import platforms

COMMANDS = "specgraph.commands"
"""The entry point group through which installed distributions add subcommands. Each is a function for typer."""
PARTS: dict[str, EntryPoint] = {each.name: each for each in sorted(entry_points(group=COMMANDS), key=lambda e: e.name)}
"""The subcommands of installed distributions, by name. Each is loaded when it is asked for (`load_part`)."""
_ELSEWHERE = {"conformance": "specgraph-conformance: in a checkout of specgraph, pip install -e ./conformance"}
"""Commands of distributions that may not be installed, each with the way to install it."""


@contextmanager
def _told() -> Generator[None]:
    """Print a line and exit with status 130 if Ctrl-C interrupts the block: typer itself prints nothing."""
    try:
        yield
    except KeyboardInterrupt:
        print("specgraph: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


class _Group(TyperGroup):
    """The command group. It handles Ctrl-C, and says how to install a command that is missing."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _told():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _ELSEWHERE and self.get_command(ctx, args[0]) is None:
            raise SpecgraphError(f"the command '{args[0]}' comes with {_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command with options listed by panel in `--help`. A narrow terminal cuts no option's name."""

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


class _PartCommand(_Command):
    """The place of a command of an installed part. A broken part thus breaks its own command alone."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        return load_part(str(self.name))[1].make_context(*arguments, **options)


_SETTINGS = {"help_option_names": ["-h", "--help"]}


def load_part(name: str) -> tuple[Callable[..., None], TyperCommand]:
    """Load the subcommand of a part: its function, and the command that typer makes of it.

    Raises:
        SpecgraphError: the part can't be loaded. The error names its distribution.
    """
    entry, alone = PARTS[name], typer.Typer(add_completion=False, rich_markup_mode=None)
    try:
        function: Callable[..., None] = entry.load()
        alone.command(name=name, cls=_Command, context_settings=_SETTINGS)(function)
        made: Any = get_command(alone)
    except Exception as error:
        part = entry.module if entry.dist is None else entry.dist.name
        raise SpecgraphError(
            f"the command '{name}' comes with {part}, which can't be loaded ({type(error).__name__}: "
            f"{first_line(error)}): pip install --upgrade {part}, or pip uninstall {part}"
        ) from error
    return function, made


def _placeholder(entry: EntryPoint) -> Callable[[], None]:
    """Return a function with the name of a part's command. Its docstring is the summary of the distribution."""

    def command() -> None: ...

    about = {} if entry.dist is None else entry.dist.metadata.json
    command.__name__, command.__doc__ = entry.name.replace("-", "_"), str(about.get("summary", ""))
    return command


app = typer.Typer(
    cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_SETTINGS
)
_OWN = (generate, chat, platforms, explain, bench, audit, draft_vocab, env, new_backend)
_OF_PARTS = [_placeholder(each) for each in PARTS.values()]
for kind, commands in ((_Command, _OWN), (_PartCommand, _OF_PARTS)):
    for command in commands:
        first = " ".join((command.__doc__ or "").split("\n\n")[0].split())
        app.command(cls=kind, short_help=first, context_settings=_SETTINGS)(command)  # click would cut the docstring


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
    """Let idle OpenMP threads spin for some microseconds only, unless the environment sets how they wait.

    GNU's OpenMP comes with torch's CPU builds and reads these variables when torch is imported. By default a waiting
    thread spins for milliseconds. On busy cores it then keeps the thread that it waits for from running.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def main() -> None:
    """Run the command. A SpecgraphError becomes one message and its exit status, without a traceback."""
    _let_idle_threads_sleep()
    write_any_text()
    try:
        app()
    except SpecgraphError as error:
        rank = os.environ.get("RANK", "0")  # set by torchrun
        if rank == "0" or not getattr(error, "everywhere", False):
            print(f"specgraph: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:  # a full disk, a name that is too long
        print(f"specgraph: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try to write the rest again at exit
        sys.exit(1)

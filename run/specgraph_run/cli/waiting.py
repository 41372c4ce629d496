"""Lines on a terminal that say what a command is doing: it loads, captures, compares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def announce(what: str) -> None:
    """Print one line on standard error, if it is a terminal, before work that shows nothing for a while: torch alone
    takes seconds to import."""
    if sys.stderr.isatty():
        print(f"specgraph: {what}", file=sys.stderr, flush=True)


@contextmanager
def waiting(console: Console | None = None) -> Generator[Callable[[str, int, int], None]]:
    """Show `loading`, then `compiling kernels 3/20` and `capturing 12/74` with a bar, until the block ends.

    The bar is removed at the end. It is not shown at all if `console`, by default standard error, is no terminal.
    Yields the `Progress` function to call.
    """
    console = console or Console(stderr=True)
    if console.is_dumb_terminal:  # it can't redraw a bar, so it gets one line
        console.print("loading and capturing")
    shown = console.is_terminal and not console.is_dumb_terminal
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *times)
    with Progress(*columns, console=console, transient=True, disable=not shown) as bars:
        task = bars.add_task("loading", total=None)
        yield lambda what, done, total: bars.update(
            task, description=f"{what} {done}/{total}", completed=done, total=total
        )

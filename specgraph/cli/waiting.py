"""Progress on a terminal while a command loads, captures and measures."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_TEXT = "{task.description}"


@contextmanager
def doing(console: Console | None = None) -> Generator[Callable[[str], None]]:
    """Show which part of its work a command is at, until the block ends. Nothing stays on the screen.

    The line changes only when it is told to: a thread that redraws it would take part in what is measured.

    Args:
        console: standard error by default. Nothing is shown where it is no terminal.

    Yields:
        What to call with a line of text at the beginning of each part of the work.
    """
    with _loading(console, TextColumn(_TEXT), TimeElapsedColumn(), auto_refresh=False) as (bars, task):
        yield lambda text: bars.update(task, description=text, refresh=True)


@contextmanager
def waiting(console: Console | None = None) -> Generator[Callable[[int, int], None]]:
    """Show `loading`, then `capturing 12/74` with a bar, until the block ends. Nothing stays on the screen.

    Args:
        console: standard error by default. Nothing is shown where it is no terminal.

    Yields:
        What to call after each capture, with the number of captures done and their number in all.
    """
    columns = (SpinnerColumn(), TextColumn(_TEXT), BarColumn(), TimeElapsedColumn())
    with _loading(console, *columns, auto_refresh=True) as (bars, task):
        yield lambda done, total: bars.update(
            task, description=f"capturing {done}/{total}", completed=done, total=total
        )


@contextmanager
def _loading(
    console: Console | None, *columns: ProgressColumn, auto_refresh: bool
) -> Generator[tuple[Progress, TaskID]]:
    console = console or Console(stderr=True)
    if console.is_dumb_terminal:  # it can't draw a line again, so it is told once that there is something to wait for
        console.print("loading and capturing")
    shown = console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=auto_refresh, disable=not shown) as bars:
        yield bars, bars.add_task("loading", total=None)

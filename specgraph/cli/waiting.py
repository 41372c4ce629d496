"""What a person sees while a command loads, captures and measures."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def doing(console: Console | None = None) -> Generator[Callable[[str], None]]:
    """Show which part of its work a command is at, until the block ends. Nothing stays on the screen.

    The line changes only when it is told to: a thread that redraws it would take part in what is measured.

    Args:
        console: standard error by default. Nothing is shown where it is no terminal.

    Yields:
        What to call with a line of text at the beginning of each part of the work.
    """
    console = console or Console(stderr=True)
    _tell(console)
    columns, quiet = (TextColumn("{task.description}"), TimeElapsedColumn()), not _redraws(console)
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=quiet) as bars:
        task = bars.add_task("loading", total=None)
        yield lambda text: bars.update(task, description=text, refresh=True)


@contextmanager
def waiting(console: Console | None = None) -> Generator[Callable[[int, int], None]]:
    """Show `loading`, then `capturing 12/74` with a bar, until the block ends. Nothing stays on the screen.

    Args:
        console: standard error by default. Nothing is shown where it is no terminal.

    Yields:
        What to call after each capture, with the number of captures done and their number in all.
    """
    console = console or Console(stderr=True)
    _tell(console)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not _redraws(console)) as bars:
        task = bars.add_task("loading", total=None)

        def captured(done: int, total: int) -> None:
            bars.update(task, description=f"capturing {done}/{total}", completed=done, total=total)

        yield captured


def _tell(console: Console) -> None:
    """Say once that there is something to wait for, on a terminal that can't draw a line again."""
    if console.is_dumb_terminal:
        console.print("loading and capturing")


def _redraws(console: Console) -> bool:
    """Whether a line can be drawn again."""
    return console.is_terminal and not console.is_dumb_terminal

"""Start-ups that all ranks finish or none: without one of them the others would wait in a collective of the device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from specgraph.device import Progress
from specgraph.errors import RankError
from specgraph.parallel.layout import ParallelLayout
from specgraph.parallel.ranks import Ranks

PATIENCE = timedelta(seconds=60)
"""The time that a rank which fails among captures waits for the others: they may wait for it on the device."""


@contextmanager
def agreed(ranks: Ranks | None, patience: timedelta | None = None) -> Generator[None]:
    """Let every rank leave the block or none, by one exchange of the hosts at its end; ranks that fail at different
    depths of such blocks have one exchange each. All ranks enter the same blocks in the same order.

    Args:
        patience: how long a rank that fails may wait for the others, in blocks that have collectives of the device: it
            has to end then, so that what watches the processes ends them.

    Raises:
        Exception: what the block raises, where all ranks have something to raise.
        RankError: on every rank, where only some have: the first of them, and its error.
    """
    if ranks is not None:
        ranks.patience = patience
    try:
        yield
        if ranks is not None:
            ranks.exchange("the start-up")
    except RankError:
        raise
    except Exception as error:
        if ranks is not None and ranks.failure is not error:
            ranks.fail(error)
        raise
    finally:
        if ranks is not None:
            ranks.patience = None


def agreed_captures(ranks: Ranks | None, progress: Progress | None = None) -> Progress | None:
    """Return the `progress` of captures after each of which the ranks meet: the warm-up of the next one has collectives
    that a rank whose capture failed does not come to. For a block that is `agreed`."""
    if ranks is None:
        return progress

    def tell(what: str, done: int, total: int) -> None:
        if what == "capturing":
            ranks.exchange("a capture")
        if progress is not None:
            progress(what, done, total)

    return tell


@contextmanager
def leave_on_error(layout: ParallelLayout | None) -> Generator[None]:
    """Close the ranks where the body fails, so that the others notice at once. Not where every rank raises this very
    error: another one may still be reading what it compares."""
    try:
        yield
    except BaseException as error:
        if layout is not None and not (isinstance(error, RankError) and error.everywhere):
            layout.ranks.close()
        raise

"""A start-up that all ranks finish, or none. If one rank failed alone, the others would wait for it on the device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from specgraph.device import Progress
from specgraph.errors import RankError
from specgraph_models.parallel import Ranks

PATIENCE = timedelta(seconds=60)
"""The time that a rank with a failed capture waits for the other ranks. They may be waiting for it on the device."""


@contextmanager
def agreed(ranks: Ranks | None, patience: timedelta | None = None) -> Generator[None]:
    """Let all ranks finish the block, or none: their hosts exchange once at its end.

    All ranks enter the same blocks in the same order. Blocks may nest: a rank that fails takes part in one exchange
    only, at the innermost block.

    Args:
        patience: for a block with collectives of the device, the time that a failing rank waits for the others. It then
            has to end, so that the launcher of the processes ends the others.

    Raises:
        Exception: the block's own exception, if every rank has one.
        RankError: on every rank, if only some fail. It names the first of them, and its error.
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
    """Return a `progress` for captures, which lets the hosts exchange after each capture. Use it in an `agreed` block.

    The warm-up of the next capture has collectives, which a rank with a failed capture would not reach.
    """
    if ranks is None:
        return progress

    def tell(what: str, done: int, total: int) -> None:
        if what == "capturing":
            ranks.exchange("a capture")
        if progress is not None:
            progress(what, done, total)

    return tell

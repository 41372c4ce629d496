"""The progress of the captures of several model runners, such as those of target and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from specgraph.capture import ModelRunner
from specgraph.device import Progress


def report_captures(runners: Sequence[ModelRunner], progress: Progress | None) -> Progress | None:
    """Return the `progress` argument for the `capture` of each runner. It counts the captures of all runners
    together."""
    if progress is None:
        return None
    captured, total = count(1), sum(len(runner.to_capture()) for runner in runners)

    def tell(what: str, done: int, of: int) -> None:
        progress(what, *((next(captured), total) if what == "capturing" else (done, of)))

    return tell

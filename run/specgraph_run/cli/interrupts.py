"""Delays Ctrl-C until a file is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def finished_first() -> Generator[None]:
    """Let a first Ctrl-C take effect at the end of the block. A second one takes effect at once."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):  # Ctrl-C does nothing here
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        asked.append((number, frame))
        signal.signal(signal.SIGINT, former)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if asked:
            former(*asked[0])

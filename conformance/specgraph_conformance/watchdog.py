"""The time limit of a case, and what happens when a case passes it.

The limit grows with the load of the machine: at a load of 20 on two cores a case gets ten times its seconds. A hang is
still found, later; a healthy case is not failed because others use the machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module

HEAVY = ("torch._dynamo", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.testing")
"""Modules that torch imports at the first capture or dispatch mode. The suite imports them before any case runs, so
that their seconds are not counted against the first case."""


def import_heavy_modules() -> None:
    """Import HEAVY; a name that this torch release does not have is passed over."""
    for name in HEAVY:
        try:
            import_module(name)
        except ImportError:
            continue


def load_factor() -> float:
    """Runnable processes per core over the last minute, at least 1; 1 where the system does not say."""
    try:
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except (AttributeError, OSError):
        return 1.0


@contextmanager
def limited(seconds: float, expired: Callable[[], None]) -> Generator[None]:
    """Call `expired` from another thread if the block takes longer than `seconds` times the load factor."""
    done = threading.Event()

    def watch() -> None:
        begin = time.monotonic()
        while not done.wait(min(seconds, 1.0)):
            if time.monotonic() - begin > seconds * load_factor():
                expired()
                return

    thread = threading.Thread(target=watch, name="specgraph-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

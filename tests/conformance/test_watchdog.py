"""The time limit of a conformance case: it ends a hang, and it grows with the load of the machine."""

from __future__ import annotations

import threading

import pytest
from specgraph_conformance import watchdog


def test_a_block_that_hangs_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "load_factor", lambda: 1.0)
    expired = threading.Event()
    with watchdog.limited(0.01, expired.set):
        expired.wait()  # for ever, if nobody ends it


def test_on_a_loaded_machine_the_same_block_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expired, enough, asked = threading.Event(), threading.Event(), list[int]()

    def loaded() -> float:
        asked.append(1)
        if len(asked) == 5:  # the limit has passed at least five times
            enough.set()
        return 1e9

    def expire() -> None:
        expired.set()
        enough.set()

    monkeypatch.setattr(watchdog, "load_factor", loaded)
    with watchdog.limited(0.01, expire):
        enough.wait()
    assert not expired.is_set()
    assert len(asked) >= 5


def test_the_load_factor_counts_processes_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 0.0, 0.0))
    assert watchdog.load_factor() == 10.0
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert watchdog.load_factor() == 1.0

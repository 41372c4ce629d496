"""Time limits. A case's ends a hang and grows with the load of the machine; one from outside keeps the report."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from conformance.third_party import install, specgraph
from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.timeouts import load_factor


def test_the_load_factor_counts_processes_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 0.0, 0.0))
    assert load_factor() == 10.0
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert load_factor() == 1.0


class Look:
    """Notes the limits of the cases that would run."""

    def __init__(self) -> None:
        self.limits = dict[str, float]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        self.limits[item.stash[CASE].id] = item.stash[CASE].timeout
        return True  # instead of running it


@pytest.mark.parametrize("timeout", [None, 8.0, 900.0])
def test_a_timeout_raises_and_lowers(timeout: float | None) -> None:
    look = Look()
    limits = {"capture.runs-nothing": 60.0, "decoding.sampled-follows-the-target": 180.0}
    pytest.main([*Selection(cases=tuple(limits), timeout=timeout).arguments("cpu")], plugins=[look])
    assert look.limits == {id: timeout or own for id, own in limits.items()}


INTERRUPT = """
import os, signal
Platform.memory = lambda self: os.kill({process}, signal.SIGTERM)
"""


def test_a_time_limit_from_outside_ends_the_run_with_its_report(tmp_path: Path) -> None:
    """`timeout` and CI send SIGTERM to the command alone."""
    folder = install(tmp_path / "site", extra=INTERRUPT.format(process=os.getpid()))
    former = signal.getsignal(signal.SIGTERM)
    cases = ["--case", "discovery.api-number", "--case", "device.memory-figures-agree"]
    done = specgraph(folder, "acme", *cases, "--json", str(tmp_path / "r.json"), jobs=1)
    report = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 1  # although every case that ran has passed
    assert [case["outcome"] for case in report["cases"]] == ["passed"]
    (problem,) = report["problems"]
    assert problem == "interrupted: 1 of 2 selected cases ran"
    assert f"acme does not conform: {problem}" in done.stdout
    assert signal.getsignal(signal.SIGTERM) is former

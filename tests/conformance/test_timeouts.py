"""Time limits. A case's ends a hang and grows with the load of the machine; one from outside keeps the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.third_party import install, specgraph
from specgraph_conformance.timeouts import load_factor


def test_the_load_factor_counts_processes_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 0.0, 0.0))
    assert load_factor() == 10.0
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert load_factor() == 1.0


COLLECT = """
import json, sys
import pytest
from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.timeouts import HEAVY

class Look:
    def __init__(self):
        self.limits, self.missing = {}, None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.limits[item.stash[CASE].id] = item.stash[CASE].timeout
        if self.missing is None:
            self.missing = [name for name in HEAVY if name not in sys.modules]
        return True  # instead of running it

seen = []
for timeout in (None, 8.0, 900.0):
    look = Look()
    cases = ("capture.runs-nothing", "decoding.sampled-follows-the-target[eagle]")
    pytest.main([*Selection(cases=cases, timeout=timeout).arguments("cpu")], plugins=[look])
    seen.append([look.limits, look.missing])
print("RESULT" + json.dumps(seen))
"""


def test_a_timeout_raises_and_lowers_and_heavy_modules_are_there_before_the_first_case() -> None:
    done = subprocess.run([sys.executable, "-u", "-c", COLLECT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.partition("RESULT")[2])
    own, lowered, raised = (limits for limits, _ in seen)
    assert own == {"capture.runs-nothing": 60, "decoding.sampled-follows-the-target[eagle]": 180}
    assert set(lowered.values()) == {8.0}
    assert set(raised.values()) == {900.0}
    assert seen[0][1] == [], "these would be imported within the first case's time"


INTERRUPT = """
import os, signal
Platform.memory = lambda self: os.kill({process}, signal.SIGTERM)
"""


def test_a_time_limit_from_outside_ends_the_run_with_its_report(tmp_path: Path) -> None:
    """`timeout` and CI send SIGTERM to the command alone."""
    folder = install(tmp_path / "site", extra=INTERRUPT.format(process=os.getpid()))
    former = signal.getsignal(signal.SIGTERM)
    cases = ["--case", "discovery.api-number", "--case", "device.memory-figures-agree"]
    done = specgraph(folder, "conformance", "acme", *cases, "--json", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 1  # although every case that ran has passed
    assert [case["outcome"] for case in report["cases"]] == ["passed"]
    (problem,) = report["problems"]
    assert problem == "interrupted: 1 of 2 selected cases ran"
    assert f"acme does not conform: {problem}" in done.stdout
    assert signal.getsignal(signal.SIGTERM) is former

"""Time limits. A case's ends a hang and grows with the load of the machine; one from outside keeps the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conformance.reports import complete_report
from conformance.third_party import install, specgraph
from specgraph_conformance import run, watchdog
from specgraph_conformance.records import RecordFile
from specgraph_conformance.render import verdict
from specgraph_conformance.report import Subject
from specgraph_conformance.run import _interrupted, _interruptible, _record_lost, _run


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


COLLECT = """
import json, sys
import pytest
from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.watchdog import HEAVY

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
    cases = ("capture.runs-nothing", "decoding.sampled-follows-the-target")
    pytest.main([*Selection(cases=cases, timeout=timeout).arguments("cpu")], plugins=[look])
    seen.append([look.limits, look.missing])
print("RESULT" + json.dumps(seen))
"""


def test_a_timeout_raises_and_lowers_and_heavy_modules_are_there_before_the_first_case() -> None:
    done = subprocess.run([sys.executable, "-u", "-c", COLLECT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.partition("RESULT")[2])
    own, lowered, raised = (limits for limits, _ in seen)
    assert own == {"capture.runs-nothing": 60, "decoding.sampled-follows-the-target": 180}
    assert set(lowered.values()) == {8.0}
    assert set(raised.values()) == {900.0}
    assert seen[0][1] == [], "these would be imported within the first case's time"


def test_a_time_limit_from_outside_ends_the_run_as_ctrl_c_does(tmp_path: Path) -> None:
    """`timeout` and CI send SIGTERM to the command alone: the process with the cases is interrupted, and ends."""
    child = (
        "import os, signal, time; print('x' * 2**20 + chr(10), flush=True); "  # more than a pipe holds: it was read
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    former = signal.getsignal(signal.SIGTERM)
    with _interruptible() as interruption:
        status, tail = _run([sys.executable, "-c", child], RecordFile(tmp_path / "records.jsonl"), True, interruption)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in tail
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_signal_between_two_processes_of_a_run_leaves_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash nobody runs cases until the next process is started: the signal comes then."""
    crash = "import os\nPlatform.memory = lambda self: os._exit(11)\n"
    folder, former = install(tmp_path / "site", extra=crash), signal.getsignal(signal.SIGTERM)

    def record_lost(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        _record_lost(*args)

    monkeypatch.setattr(run, "_record_lost", record_lost)
    cases = ["--case", "device.memory-figures-agree", "--case", "streams.event-verbs"]
    done = specgraph(folder, "conformance", "acme", *cases, "--json", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 1
    assert [case["outcome"] for case in report["cases"]] == ["failed"]
    assert report["problems"] == ["interrupted: 1 of 2 selected cases ran"]
    assert signal.getsignal(signal.SIGTERM) is former


def test_an_interrupted_run_is_not_green() -> None:
    """Also where every case that ran has passed."""
    whole = complete_report()
    subject = {name: getattr(whole.subject, name) for name in Subject.__dataclass_fields__}
    planned = {"planned": [{"id": case.id} for case in whole.cases], "subject": subject, "problems": [], "shard": None}
    first = {case.id: case for case in whole.cases[:3]}
    report = _interrupted(planned, first)
    assert report.cases == whole.cases[:3]
    assert not report.is_green
    assert verdict(report).endswith(f"does not conform: interrupted: 3 of {len(whole.cases)} selected cases ran")

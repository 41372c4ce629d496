"""Time limits. A case's ends a hang and grows with the load of the machine; one from outside keeps the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import Done
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


INTERRUPTED = """
import os, signal
WORKER = "PYTEST_XDIST_WORKER" in os.environ and os.getpid() != {process}

def end(is_moment):
    if is_moment:
        os.kill({process}, signal.{signal})

def _open(index):
    end("{moment}" == ("collection" if WORKER else "start"))
    return Platform()

Platform.memory = lambda self: end("{moment}" == "case")
"""
CASES = ["--case", "discovery.api-number", "--case", "device.memory-figures-agree"]


@pytest.mark.parametrize(
    ("moment", "sent"), [("start", "SIGINT"), ("collection", "SIGINT"), ("case", "SIGINT"), ("case", "SIGTERM")]
)
def test_an_end_from_outside_is_one_line_and_keeps_the_report(moment: str, sent: str, tmp_path: Path) -> None:
    """Ctrl-C, and `timeout` and CI, which send SIGTERM to the command alone."""
    folder = install(tmp_path / "site", extra=INTERRUPTED.format(process=os.getpid(), signal=sent, moment=moment))
    former = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    done = specgraph(folder, "acme", *CASES, "--json", str(tmp_path / "r.json"), jobs=1)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == former
    check_interrupted(moment, done, tmp_path / "r.json")


@pytest.mark.parametrize("moment", ["collection", "case"])
def test_ctrl_c_in_a_terminal_reaches_every_process(moment: str, tmp_path: Path) -> None:
    extra = INTERRUPTED.replace("os.kill({process}", "os.killpg(0").format(process=0, signal="SIGINT", moment=moment)
    folder = install(tmp_path / "site", extra=extra)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    report = tmp_path / "r.json"
    done = subprocess.run(
        [sys.executable, "-m", "specgraph_run", "conformance", "acme", *CASES, "--json", report, "--jobs", "1"],
        capture_output=True, text=True, env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=folder,
        check=False, start_new_session=True,
    )  # fmt: skip
    check_interrupted(moment, done, report)


def check_interrupted(moment: str, done: Done, path: Path) -> None:
    """Check status, words and report of a run that was interrupted at a moment."""
    assert done.returncode == 130, done.stderr
    *before, last = done.stderr.splitlines()
    assert last == "specgraph: interrupted"
    assert "Traceback" not in done.stderr
    if moment != "case":
        assert (before, done.stdout, path.exists()) == ([], "", False)
        return
    report = json.loads(path.read_text())
    assert (report["passed"], report["cases"]) == ({"discovery": ["discovery.api-number"]}, [])
    (problem,) = report["problems"]
    assert problem == "interrupted: 1 of 2 selected cases ran"
    assert f"acme does not conform: {problem}" in done.stdout

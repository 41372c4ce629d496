"""Runs the suite in a separate process, and in a new one after a hang or a crash, which costs only its own case."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from specgraph.errors import ConfigError, SpecgraphError

from specgraph_conformance.plugin import UNHEALTHY
from specgraph_conformance.records import RecordFile
from specgraph_conformance.report import CaseResult, Report, Shard, Subject
from specgraph_conformance.session import Session, open_session
from specgraph_conformance.shards import ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases run, and how; empty means all."""

    cases: Sequence[str] = ()
    groups: Sequence[str] = ()
    hazards: Sequence[str] = ()
    keyword: str = ""
    """A pytest -k expression."""
    quick: bool = False
    seed: int = 0
    xfails: Path | None = None
    timeout: float | None = None
    """Seconds that a case may take, for every case instead of its own limit."""
    attention: Sequence[str] = ()
    """`NAME=MODULE:FUNCTION` each: attention backends to test as if they were the platform's own."""
    suite: str | None = None
    """The version of the suite whose cases run; None for the newest."""
    shard: str | None = None
    """I/N: the cases of the I-th of N shards (`shards.py`)."""
    pytest_args: Sequence[str] = ("-q", "--no-header", "-rN")

    def open(self, platform: str) -> Session:
        """Open the platform as the run will, for the errors that this raises."""
        return open_session(platform, seed=self.seed, xfails=self.xfails, attention=self.attention, suite=self.suite)

    def arguments(self, platform: str) -> list[str]:
        """Arguments for pytest."""
        here = Path(__file__).parent
        # A path, not --pyargs: without one pytest loads the conftest.py files of the folder that it is started in.
        out = ["-c", str(here / "pytest.ini"), "--rootdir", str(here), str(here), "--specgraph-platform", platform]
        lists = {"case": self.cases, "group": self.groups, "hazard": self.hazards, "attention": self.attention}
        for option, values in lists.items():
            for value in values:
                out += [f"--specgraph-{option}", value]
        out += ["-k", self.keyword] if self.keyword else []
        out += ["--specgraph-timeout", str(self.timeout)] if self.timeout else []
        out += ["--specgraph-suite", self.suite] if self.suite else []
        out += ["--specgraph-shard", self.shard] if self.shard else []
        out += ["--specgraph-quick"] if self.quick else []
        out += ["--specgraph-xfails", str(self.xfails)] if self.xfails else []
        traceback = "short" if self.cases else "no"  # the report says what failed; one case is looked into
        return [*out, "--specgraph-seed", str(self.seed), f"--tb={traceback}", *self.pytest_args]


def run_suite(platform: str, selection: Selection, *, quiet: bool = False) -> Report:
    """Run the selected cases on a platform, each process going on where the last one ended.

    Raises:
        PlatformError, ConfigError: before anything runs: the platform, the declared gaps or the selection are wrong.
    """
    with tempfile.TemporaryDirectory(prefix="specgraph-conformance-") as folder, _interruptible() as interruption:
        records = RecordFile(Path(folder) / "records.jsonl")
        command = [sys.executable, "-m", "pytest", *selection.arguments(platform)]
        command += ["--specgraph-records", str(records.path)]
        while True:
            finished = len(records.results())
            status, tail = _run(command, records, quiet, interruption)
            planned = _planned(records)
            if planned is None:
                if interruption.signals:
                    raise KeyboardInterrupt
                _explain(platform, selection, tail)
            if interruption.signals or status == pytest.ExitCode.INTERRUPTED:
                return _interrupted(planned, records.results())
            if (case_id := records.unfinished()) is not None:
                _record_lost(records, planned, case_id, status, tail)
            results = records.results()
            if all(case["id"] in results for case in planned["planned"]):
                return _report(planned, results)
            if len(results) == finished:
                raise SpecgraphError(f"the suite ended (status {status}) without a result:\n{tail}")
            if status != UNHEALTHY and case_id is None:
                return _interrupted(planned, results)


@dataclass(slots=True)
class _Interruption:
    """Ctrl-C, or SIGTERM, which the time limits of `timeout` and of CI send: both end a run with its report."""

    signals: int = 0
    """How many came."""
    process: subprocess.Popen[str] | None = None
    """The process that runs cases now; None between two of them."""

    def handle(self, number: int, frame: object) -> None:
        """Interrupt the process with the cases; a second signal ends it where it is."""
        self.signals += 1
        self.pass_on()

    def pass_on(self) -> None:
        """What has come so far, to the process, if there is one."""
        if self.signals and self.process is not None:
            self.process.send_signal(signal.SIGINT if self.signals == 1 else signal.SIGKILL)


@contextmanager
def _interruptible() -> Generator[_Interruption]:
    """Note signals for as long as the block runs, also while no process with cases does."""
    interruption = _Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    former = {number: signal.signal(number, interruption.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _run(command: Sequence[str], records: RecordFile, quiet: bool, interruption: _Interruption) -> tuple[int, str]:
    """Exit status, and the last lines of the output, which is passed on once cases run."""
    tail: list[str] = []
    # In a session of its own: Ctrl-C and `timeout` signal whole process groups, and it is interrupted once, from here.
    start = functools.partial(subprocess.Popen[str], text=True, errors="replace", start_new_session=True)
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as interruption.process:
        p = interruption.process
        assert p.stdout is not None
        interruption.pass_on()  # what came before there was a process
        for line in p.stdout:
            tail = [*tail[-40:], line]
            if not quiet and records.path.exists():
                sys.stderr.write(line)
        status = p.wait()
    interruption.process = None
    return status, "".join(tail)


def _planned(records: RecordFile) -> dict[str, Any] | None:
    sessions = [record for record in records.read() if record["event"] == "session"]
    return sessions[-1] if sessions else None


def _explain(platform: str, selection: Selection, tail: str) -> NoReturn:
    """The process gave up before it had a plan: say why, by opening the platform here."""
    selection.open(platform)
    errors = [line.removeprefix("ERROR: ") for line in tail.splitlines() if line.startswith("ERROR: ")]
    raise ConfigError(errors[0] if errors else f"the suite could not start:\n{tail}")


def _record_lost(records: RecordFile, planned: dict[str, Any], case_id: str, status: int, tail: str) -> None:
    case = next(case for case in planned["planned"] if case["id"] == case_id)
    if records.expired(case_id):
        reason = f"did not finish within {case['timeout']:g} s"
    else:
        reason = f"the process died with status {status}: {tail.strip().splitlines()[-1:]}"
    outcome = "failed"
    if case["xfail"] is not None:
        outcome, reason = "xfailed", f"{case['xfail']} ({reason})"
    group = case_id.partition(".")[0]
    result = CaseResult(case_id, group, case["property"], case["hazard"], outcome, reason, case["cause"])
    records.write("result", {f: getattr(result, f) for f in CaseResult.__slots__})


def _report(planned: dict[str, Any], results: dict[str, CaseResult]) -> Report:
    order = [case["id"] for case in planned["planned"]]
    cases = [results[case_id] for case_id in order if case_id in results]
    shards = [ran(Shard(**planned["shard"]), order, results)] if planned["shard"] else []
    return Report(Subject(**planned["subject"]), cases, planned["problems"], shards)


def _interrupted(planned: dict[str, Any], results: dict[str, CaseResult]) -> Report:
    """A report that is not green, whatever the cases that ran say."""
    count = len(planned["planned"])
    problem = f"interrupted: {len(results)} of {count} selected cases ran"
    return _report({**planned, "problems": [*planned["problems"], problem]}, results)

"""Runs the suite in processes of pytest-xdist. If a case ends its process by a hang or a crash, another one starts."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from specgraph.errors import ConfigError

from specgraph_conformance.plugin import RESULTS
from specgraph_conformance.report import Report
from specgraph_conformance.results import Results

if TYPE_CHECKING:
    from specgraph_conformance.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected cases and the options of the run. An empty field selects all."""

    cases: Sequence[str] = ()
    groups: Sequence[str] = ()
    hazards: Sequence[str] = ()
    keyword: str = ""
    """A pytest -k expression."""
    quick: bool = False
    seed: int = 0
    examples: int = 1
    """The factor by which random cases multiply their examples, and their time limits."""
    xfails: Path | None = None
    timeout: float | None = None
    """The time limit of every case, in seconds. None for each case's own limit."""
    attention: Sequence[str] = ()
    """Attention backends to test like the platform's own, each as NAME=MODULE:FUNCTION."""
    pytest_args: Sequence[str] = ("-q", "--no-header", "-rN")

    def open(self, platform: str) -> Session:
        """Open the platform as the run will, so that errors show before it."""
        from specgraph_conformance.session import open_session  # a slow import: it imports torch

        xfails = None if self.xfails is None else str(self.xfails)
        return open_session(platform, seed=self.seed, xfails=xfails, attention=self.attention)

    def _paths(self, here: Path) -> list[str]:
        """Return the files of the named cases, so that no process collects the others. A case of the op table needs
        all files."""
        names = {f'"{name.partition("[")[0]}"' for name in self.cases}
        texts = {str(path): path.read_text(encoding="utf-8") for path in sorted(here.glob("cases/test_*.py"))}
        found = {name: path for path, text in texts.items() for name in names if name in text}
        if not names or found.keys() != names:
            return [str(here)]
        return [path for path in texts if path in found.values()]

    def arguments(self, platform: str) -> list[str]:
        """Return the arguments for pytest."""
        here = Path(__file__).parent
        # A path instead of --pyargs: without a path pytest loads the conftest.py files of the current folder.
        out = ["-c", str(here / "pytest.ini"), "--rootdir", str(here), *self._paths(here)]
        out += ["--specgraph-platform", platform]
        lists = {"case": self.cases, "group": self.groups, "hazard": self.hazards, "attention": self.attention}
        for option, values in lists.items():
            for value in values:
                out += [f"--specgraph-{option}", value]
        out += ["-k", self.keyword] if self.keyword else []
        out += ["--specgraph-timeout", str(self.timeout)] if self.timeout else []
        out += ["--specgraph-examples", str(self.examples)] if self.examples != 1 else []
        out += ["--specgraph-quick"] if self.quick else []
        out += ["--specgraph-xfails", str(self.xfails)] if self.xfails else []
        traceback = "short" if self.cases else "no"  # the report has the failures; a traceback is for named cases
        return [*out, "--specgraph-seed", str(self.seed), f"--tb={traceback}", *self.pytest_args]


class _Run(io.StringIO):
    """The output of a run. It goes to standard error, but only from the first case on: an earlier error stays one
    line."""

    def __init__(self) -> None:
        super().__init__()
        self.results: Results | None = None
        self._terminal = sys.stderr

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        results: Results = config.stash[RESULTS]
        results.show = False  # the caller of `run_suite` shows the report
        self.results = results

    def write(self, text: str, /) -> int:
        return self._terminal.write(text) if self.results and self.results.began else super().write(text)


def run_suite(platform: str, selection: Selection, *, jobs: int | None = None) -> Report:
    """Run the selected cases on a platform.

    Args:
        jobs: the number of processes that run cases on the device at the same time. The default is 1; on the host it is
            one per core, up to 4, unless cases are named. 0 runs the cases in this process, which a case that hangs or
            crashes then ends.

    Raises:
        PlatformError, ConfigError: the platform, the declared gaps or the selection are wrong. Nothing ran.
        KeyboardInterrupt: Ctrl-C or the signal of a time limit came before the first case. If one comes later, the run
            ends with the report of the cases that ran.
    """
    session = selection.open(platform)
    session.platform.close()
    if jobs is None:
        is_on_host = session.platform.device.type == "cpu"
        jobs = min(4, os.cpu_count() or 1) if is_on_host and not selection.cases else 1
    run = _Run()
    workers = ["-n", str(jobs), "--dist", "worksteal", "--max-worker-restart", "10000", "--disable-warnings"]
    with redirect_stdout(run), redirect_stderr(run), _noted_interrupts() as interrupts:
        pytest.main([*selection.arguments(platform), *workers], plugins=[run])
    if interrupts and (run.results is None or not run.results.began):
        raise KeyboardInterrupt
    if run.results is None or not run.results.began:
        refused = run.results and run.results.said.get("refused")
        raise ConfigError(refused or f"the suite could not start:\n{run.getvalue()}")
    return replace(run.results.report(), interrupted=bool(interrupts))


@contextmanager
def _noted_interrupts() -> Generator[list[int]]:
    """Interrupt the block at Ctrl-C, and at the signal that `timeout` and CI send at their time limits.

    Yields the list of the signals that came. It is needed because pytest ends without an error at an interrupt.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    heeded = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    former = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield seen
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

"""The results of a run, collected from pytest's reports, which xdist's workers send if there are any."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specgraph_conformance.case import MARKER, Case
from specgraph_conformance.plugin import RESULT
from specgraph_conformance.render import print_report
from specgraph_conformance.report import CaseResult, Report, result_of

if TYPE_CHECKING:
    from specgraph_conformance.session import Session

SAID = ("problems", "refused")
"""The names of values that `Plugin` passes on: problems that belong to no case, and why the selection was refused."""


class Results:
    """Collects the result of each case, in the parent process, which survives a crashing worker."""

    def __init__(self, session: Session, timeout: float | None) -> None:
        self.said: dict[str, Any] = {}
        """Values from the process that selected the cases, by the names in SAID."""
        self.show = True
        """False if the caller of pytest shows the report."""
        self._session, self._timeout = session, timeout
        self._planned: list[str] = []
        self._found: dict[str, CaseResult] = {}
        self._started: dict[str, float] = {}
        self._working = False

    @property
    def began(self) -> bool:
        """True after the first case was started."""
        return bool(self._started)

    def report(self) -> Report:
        """Return the report of the cases that have a result, in the order of the suite."""
        cases = [self._found[test] for test in self._planned if test in self._found]
        problems = [*self.said.get("problems", ())]
        if len(cases) < len(self._planned):
            problems.append(f"interrupted: {len(cases)} of {len(self._planned)} selected cases ran")
        return Report(self._session.subject, cases, problems)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._planned = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._planned = list(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()
        self._working = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: Any = dict(report.user_properties).get(RESULT)
        before = self._found.get(report.nodeid)
        if found is not None and (before is None or before.outcome != "failed"):  # a teardown may fail too
            self._found[report.nodeid] = CaseResult(**found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Record a failure for the case that ended its worker. A case that has a result
        keeps it: the crash came after the case."""
        if crashitem in self._found:
            return
        case = case_at(crashitem)
        limit = self._timeout or case.timeout
        took = time.monotonic() - self._started.get(crashitem, time.monotonic())
        outcome, reason = "failed", f"the process died after {took:.1f} s; its last words are in the run's output"
        if took >= limit:
            reason = f"did not finish within {limit:g} s"
        if (xfail := self._session.xfail_of(case.id)) is not None:
            outcome, reason = "xfailed", f"{xfail.text} ({reason})"
        self._found[crashitem] = result_of(case, outcome, reason)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if not error:
            self.said |= {name: node.workeroutput[name] for name in SAID if name in node.workeroutput}
        elif not self._working:
            pytest.exit("a process ended before its first case: nothing more can run")
        self._working = False

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.show and self.began:
            text = io.StringIO()
            print_report(self.report(), text)
            terminalreporter.write(text.getvalue())


def case_at(test: str) -> Case:
    """Return the case of a test by the name that pytest gives it. The process that collected it is gone."""
    path, _, name = test.partition("::")
    function, bracket, parameters = name.partition("[")
    module = import_module(f"{__package__}.cases.{Path(path).stem}")
    (declared,) = (mark.args[0] for mark in getattr(module, function).pytestmark if mark.name == MARKER)
    return replace(declared, id=f"{declared.id}{bracket}{parameters}")

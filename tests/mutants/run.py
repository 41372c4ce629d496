"""Runs the suite's cases for one hazard against its mutant, in a fork of a process that has collected the suite.

The case that failed the mutant when docs/hazards.md was written runs first.

pytest -s tests/mutants -k NAME          shows how one mutant is failed
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forks import forks
from mutants.hazards import KILLERS
from specgraph_conformance import session
from specgraph_conformance.plugin import CASE, RESULT, SESSION
from specgraph_conformance.run import Selection

PLATFORM = "cpu"
HUNG = "did not finish"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The suite's answer to one mutant."""

    name: str
    killed_by: str = ""
    """The first failed case that names the hazard; empty if none failed."""
    reason: str = ""
    num_cases: int = 0
    """Cases of this hazard."""


class Forks:
    """A pytest plugin: in place of the collected cases it runs the mutants that it is asked for, each in a fork.

    What came of a mutant so far is in a file: a hang ends its process, as the failure of the case that it is in.
    """

    def __init__(self, asked: Connection, path: Path) -> None:
        self.asked, self.path, self.verdict = asked, path, Verdict("")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for name in iter(self.asked.recv, ""):
            if not (process := os.fork()):
                try:
                    self.run(name, session)
                finally:
                    os._exit(0)
            os.waitpid(process, 0)  # each case has a limit of its own
            self.asked.send(name)
        return True

    def run(self, name: str, suite: pytest.Session) -> None:
        """Put the bug back in this process, and run the cases of its hazard until one fails."""
        from mutants.all import MUTANTS

        MUTANTS[name].apply(pytest.MonkeyPatch())
        suite.config.stash[SESSION] = session.open_session(PLATFORM)  # as the bug lets it
        items = [item for item in suite.items if item.stash[CASE].hazard == MUTANTS[name].hazard]
        suite.items = sorted(items, key=lambda item: item.stash[CASE].id != KILLERS.get(name))
        self.verdict = Verdict(name, num_cases=len(items))
        for item, following in zip(suite.items, [*suite.items[1:], None], strict=True):
            suite.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def note(self, killed_by: str, reason: str) -> None:
        self.verdict = replace(self.verdict, killed_by=killed_by, reason=reason)
        self.path.write_text(json.dumps(asdict(self.verdict)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.note(item.stash[CASE].id, HUNG)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.note(self.verdict.killed_by, dict(report.user_properties)[RESULT]["reason"])

    def pytest_runtest_logfinish(self) -> None:
        if self.verdict.reason != HUNG:
            os._exit(0)
        self.note("", "")


def collect(asked: Connection, path: Path) -> None:
    """Collect the suite in this process, and answer with forks of it."""
    with open(os.devnull, "w") as quiet, pytest.MonkeyPatch.context() as patch:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it would import all that is installed
        patch.setattr(session, "_sources", lambda item: [])  # digests and git's words, for a report
        patch.setattr(session, "discover", cache(session.discover))  # the entry points of all that is installed
        selection = Selection(pytest_args=["-p", "specgraph_conformance.plugin"])
        pytest.main(selection.arguments(PLATFORM), plugins=[Forks(asked, path)])


@contextmanager
def judging() -> Generator[Callable[[str], Verdict]]:
    """Start a process that collects the suite; the function runs one mutant in a fork of it."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory() as folder, ours:
        path = Path(folder) / "verdict.json"
        forks().Process(target=collect, args=(theirs, path)).start()
        theirs.close()

        def judge(name: str) -> Verdict:
            path.unlink(missing_ok=True)
            ours.send(name)
            ours.recv()
            return Verdict(**json.loads(path.read_text())) if path.exists() else Verdict(name)

        yield judge
        ours.send("")

"""Runs what guards against one hazard with its mutant, in a fork of a process that has collected it all.

That is the suite's cases of the hazard. If they pass, or there are none because no backend can have the bug, it is the
tests that are marked with the hazard. What failed the mutant when docs/hazards.md was written runs first.

pytest -s tests/mutants -k NAME          shows how one mutant is failed
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forks import forks
from mutants.hazards import KILLERS
from specgraph_conformance import session as suite_session
from specgraph_conformance.plugin import CASE, RESULT, SESSION
from specgraph_conformance.run import Selection

PLATFORM = "cpu"
HUNG = "did not finish"
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one mutant."""

    name: str
    killed_by: str = ""
    """The first failed case or test that names the hazard; empty if none failed."""
    reason: str = ""
    num_cases: int = 0
    """Cases or tests of this hazard."""


class Forks:
    """A pytest plugin: in place of the collected items it runs the mutants that it is asked for, each in a fork.

    What came of a mutant so far is in a file: a hang ends its process, as the failure of the item that it is in.
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

    def run(self, name: str, session: pytest.Session) -> None:
        """Put the bug back in this process, and run the items of its hazard until one fails."""
        from mutants.all import MUTANTS

        MUTANTS[name].apply(pytest.MonkeyPatch())
        self.open(session)
        items = [item for item in session.items if MUTANTS[name].hazard in self.hazards(item)]
        session.items = sorted(items, key=lambda item: self.id(item) != KILLERS.get(name))
        self.verdict = Verdict(name, num_cases=len(items))
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def open(self, session: pytest.Session) -> None:
        """Prepare the run of items in a fork."""

    def hazards(self, item: pytest.Item) -> list[str]:
        return [mark.args[0] for mark in item.iter_markers("hazard")]

    def id(self, item: pytest.Item) -> str:
        return item.nodeid

    def reason(self, report: pytest.TestReport) -> str:
        return getattr(report.longrepr, "reprcrash").message  # noqa: B009  (a union of pytest's own classes)

    def note(self, killed_by: str, reason: str) -> None:
        self.verdict = replace(self.verdict, killed_by=killed_by, reason=reason)
        self.path.write_text(json.dumps(asdict(self.verdict)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.note(self.id(item), HUNG)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.note(self.verdict.killed_by, self.reason(report))

    def pytest_runtest_logfinish(self) -> None:
        if self.verdict.reason != HUNG:
            os._exit(0)
        self.note("", "")


class SuiteForks(Forks):
    """Forks that run cases of the suite, on the platform as the bug lets it open."""

    def open(self, session: pytest.Session) -> None:
        session.config.stash[SESSION] = suite_session.open_session(PLATFORM)

    def hazards(self, item: pytest.Item) -> list[str]:
        return [item.stash[CASE].hazard or ""]

    def id(self, item: pytest.Item) -> str:
        return item.stash[CASE].id

    def reason(self, report: pytest.TestReport) -> str:
        return dict(report.user_properties)[RESULT]["reason"]


def collect(arguments: list[str], forks: Forks) -> None:
    """Collect in this process, and answer with forks of it."""
    with open(os.devnull, "w") as quiet, pytest.MonkeyPatch.context() as patch:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it would import all that is installed
        patch.setattr(suite_session, "_sources", lambda item: [])  # digests and git's words, for a report
        patch.setattr(
            suite_session, "discover", cache(suite_session.discover)
        )  # the entry points of all that is installed
        pytest.main(arguments, plugins=[forks])


def marked() -> list[str]:
    """Return the files of the tests that name a hazard."""
    return [str(path) for path in sorted(TESTS.glob("*/test_*.py")) if "mark.hazard(" in path.read_text()]


@contextmanager
def judging() -> Generator[Callable[[str], Verdict]]:
    """Start processes that collect the suite and the marked tests; the function runs one mutant in forks of them."""
    suite = Selection(pytest_args=["-p", "specgraph_conformance.plugin"]).arguments(PLATFORM)
    tests = ["-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS.parent), *marked()]
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "verdict.json"
        ends: list[Connection] = []
        for arguments, kind in ((suite, SuiteForks), (tests, Forks)):
            ours, theirs = Pipe()
            ends.append(stack.enter_context(ours))
            forks().Process(target=collect, args=(arguments, kind(theirs, path))).start()
            theirs.close()

        def judge(name: str) -> Verdict:
            verdict, seen = Verdict(name), 0
            for end in ends:
                path.unlink(missing_ok=True)
                end.send(name)
                end.recv()
                if path.exists():
                    verdict = Verdict(**json.loads(path.read_text()))
                seen += verdict.num_cases
                if verdict.killed_by:
                    break
            return replace(verdict, num_cases=seen)

        yield judge
        for end in ends:
            end.send("")

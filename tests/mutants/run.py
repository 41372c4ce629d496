"""Runs the suite's cases for one hazard against its mutant, in a process of its own.

The case that failed the mutant when docs/hazards.md was written runs first.

python -m mutants.run NAME          (with tests/ on the path) shows how one mutant is failed
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
from forks import CASES, forks
from mutants.hazards import KILLERS
from specgraph_conformance import session
from specgraph_conformance.case import MARKER
from specgraph_conformance.plugin import CASE, RESULT
from specgraph_conformance.run import Selection

PYTEST_ARGS = ["-p", "specgraph_conformance.plugin", "-q", "-x", "--no-header"]
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


class Watch:
    """Writes what came of a mutant so far: a hang ends the process, as the failure of the case that it is in."""

    def __init__(self, name: str, path: Path) -> None:
        self.verdict, self.path = Verdict(name), path

    def note(self, **found: str | int) -> None:
        self.verdict = replace(self.verdict, **found)  # pyright: ignore
        self.path.write_text(json.dumps(asdict(self.verdict)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note(num_cases=len(session.items))
        session.items.sort(key=lambda item: item.stash[CASE].id != KILLERS.get(self.verdict.name))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.note(killed_by=item.stash[CASE].id, reason=HUNG)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.note(reason=dict(report.user_properties)[RESULT]["reason"])

    def pytest_runtest_logfinish(self) -> None:
        if self.verdict.reason == HUNG:
            self.note(killed_by="", reason="")
        elif multiprocessing.parent_process() is not None:
            os._exit(0)  # the verdict is written, and nobody reads the suite's report of it


def tests_of(hazard: str) -> list[str]:
    """Return the tests that are cases of a hazard, as pytest names them, so that it need not collect the others."""
    return [
        f"{module.__file__}::{name}"
        for module in map(import_module, CASES)
        for name, test in vars(module).items()
        for mark in getattr(test, "pytestmark", ())
        if mark.name == MARKER and mark.args[0].hazard == hazard
    ]


def run_mutant(name: str, platform: str, path: Path) -> None:
    """Put the bug back in this process, and run the cases of its hazard until one fails."""
    from mutants.all import MUTANTS

    gc.freeze()  # what was loaded before: the collector need not go through all of torch again in every process
    with open(os.devnull, "w") as quiet:
        if multiprocessing.parent_process() is not None:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        with pytest.MonkeyPatch.context() as patch:
            MUTANTS[name].apply(patch)
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each process would import all that is installed
            patch.setattr(session, "_sources", lambda item: [])  # digests and git's words, for a report
            selection = Selection(tests=tests_of(MUTANTS[name].hazard), pytest_args=PYTEST_ARGS)
            pytest.main(selection.arguments(platform), plugins=[Watch(name, path)])


def judge(name: str, platform: str = "cpu") -> Verdict:
    """Run one mutant in a fork of a warm process and read what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdict.json"
        process = forks().Process(target=run_mutant, args=(name, platform, path))  # pyright: ignore
        process.start()
        process.join()  # each case has a limit of its own: a hang ends the process
        return Verdict(**json.loads(path.read_text())) if path.exists() else Verdict(name)


def judge_all(names: list[str], platform: str = "cpu", workers: int = 2) -> dict[str, Future[Verdict]]:
    """All mutants, `workers` at a time."""
    pool = ThreadPoolExecutor(workers)
    return {name: pool.submit(judge, name, platform) for name in names}


if __name__ == "__main__":
    for mutant_name in sys.argv[1:]:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            run_mutant(mutant_name, "cpu", Path(file.name))
            print(Path(file.name).read_text())

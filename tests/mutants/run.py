"""Runs the suite's cases for one hazard against its mutant, in a process of its own.

python -m mutants.run NAME          (with tests/ on the path) shows how one mutant is failed
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from pkgutil import iter_modules

from specgraph_conformance import cases, watchdog

PRELOAD = ["mutants.all", "specgraph_conformance.plugin", "specgraph.device.cpu.platform"]
PRELOAD += watchdog.HEAVY
PRELOAD += [f"{cases.__name__}.{module.name}" for module in iter_modules(cases.__path__)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the suite said of one mutant."""

    name: str
    killed_by: str = ""
    """The first failed case that names the hazard; empty if none failed."""
    reason: str = ""
    num_cases: int = 0
    """Cases of this hazard."""


def run_mutant(name: str, platform: str, records: str) -> None:
    """In this process: put the bug back and run the cases of its hazard until one fails."""
    import gc
    import os

    import pytest
    from mutants.all import MUTANTS
    from specgraph_conformance.run import Selection

    gc.freeze()  # what was loaded before: the collector need not go through all of torch again in every process
    with open(os.devnull, "w") as quiet:
        if multiprocessing.parent_process() is not None:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        with pytest.MonkeyPatch.context() as patch:
            MUTANTS[name].apply(patch)
            selection = Selection(hazards=[MUTANTS[name].hazard], pytest_args=["-q", "-x", "--no-header"])
            pytest.main([*selection.arguments(platform), "--specgraph-records", records])


def judge(name: str, platform: str = "cpu", context: BaseContext | None = None) -> Verdict:
    """Run one mutant in a fork of a warm process and read what came of it; a hang counts as its case's failure."""
    from mutants.all import MUTANTS
    from specgraph_conformance.records import RecordFile

    hazard = MUTANTS[name].hazard
    context = context or forks()
    with tempfile.TemporaryDirectory() as folder:
        records = RecordFile(Path(folder) / "records.jsonl")
        process = context.Process(target=run_mutant, args=(name, platform, str(records.path)), daemon=True)  # pyright: ignore
        process.start()
        process.join()  # each case has a limit of its own: a hang ends the process
        planned = [r for r in records.read() if r["event"] == "session"]
        cases = len(planned[-1]["planned"]) if planned else 0
        if (hung := records.unfinished()) is not None:
            return Verdict(name, hung, "did not finish", cases)
        failed = [r for r in records.results().values() if r.outcome == "failed" and r.hazard == hazard]
        return Verdict(name, failed[0].id, failed[0].reason, cases) if failed else Verdict(name, num_cases=cases)


def forks() -> BaseContext:
    """Processes forked from one that has torch and the suite loaded and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def judge_all(names: list[str], platform: str = "cpu", workers: int = 2) -> dict[str, Future[Verdict]]:
    """All mutants, `workers` at a time."""
    context, pool = forks(), ThreadPoolExecutor(workers)
    return {name: pool.submit(judge, name, platform, context) for name in names}


if __name__ == "__main__":
    for mutant_name in sys.argv[1:]:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            run_mutant(mutant_name, "cpu", file.name)
            print(*(json.loads(line).get("reason", "") for line in Path(file.name).read_text().splitlines()), sep="\n")

"""Judges the mutants of a session, each in a fork of a process that has torch loaded and none of our modules.

python tests/mutation/judge.py SESSION.sqlite          (in the root of a copy of the repository: files are mutated)

A mutant is killed when a test fails, or when it takes five times the CPU time that the tests take without it. Verdicts
are kept: the command goes on where it was stopped.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from types import ModuleType

import cosmic_ray.plugins
import pytest
from cosmic_ray.mutating import _make_diff, use_mutation
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult
from sample import settings

TIMES_LONGER = 5
FORKS = multiprocessing.get_context("fork")


def run_tests(arguments: list[str], output: str, cpu_seconds: int, modules: str | None) -> None:
    """In a fork: run the tests, and exit with pytest's status."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    sys.dont_write_bytecode = modules is None  # a mutant's modules must not be what the next one loads
    status = int(pytest.main(["-x", "-q", "--no-header", "--tb=line", *arguments]))
    if modules is not None:
        Path(modules).write_text("\n".join(name for name, module in sys.modules.items() if _is_installed(module)))
    sys.stdout.flush()
    os._exit(status)


def fork(arguments: list[str], output: Path, cpu_seconds: int, modules: Path | None = None) -> tuple[int | None, float]:
    """Exit status of the tests (None: too slow) and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = FORKS.Process(target=run_tests, args=(arguments, str(output), cpu_seconds, modules and str(modules)))
    process.start()
    process.join(20 * cpu_seconds)  # one that waits for something takes no CPU time
    slow = process.is_alive() or (process.exitcode or 0) < 0
    if process.is_alive():
        process.kill()
        process.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return None if slow else process.exitcode, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def warm_up(arguments: list[str], folder: Path) -> float:
    """Run tests on the code as it is, and load what they loaded of others' modules; CPU seconds they take."""
    modules, output = folder / "modules.txt", folder / "output.txt"
    status, seconds = fork(arguments, output, 3600, modules)
    if status != 0:
        raise SystemExit(f"the tests fail without a mutant:\n{output.read_text()}")
    for name in modules.read_text().splitlines():
        try:
            importlib.import_module(name)
        except Exception:
            continue  # only costs time
    if loaded := [name for name in sys.modules if name.partition(".")[0] in ("specgraph", "specgraph_conformance")]:
        raise SystemExit(f"forks would not see mutants of {', '.join(loaded)}: who imported them?")
    return seconds


def _is_installed(module: ModuleType | None) -> bool:
    """Whether it is a library's or Python's own, not ours and not a test."""
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file or file.startswith(sys.base_prefix)


def judge(item: WorkItem, arguments: list[str], folder: Path, limit: int) -> tuple[WorkResult, float]:
    """Run tests on one mutant: the result and CPU seconds."""
    (mutation,) = item.mutations
    operator = cosmic_ray.plugins.get_operator(mutation.operator_name)(**mutation.operator_args)
    output = folder / "output.txt"
    with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
        status, seconds = fork(arguments, output, limit)
        diff = "\n".join(_make_diff(before, after, mutation.module_path))
    text = "too slow\n" + output.read_text() if status is None else output.read_text()
    outcome = TestOutcome.SURVIVED if status == 0 else TestOutcome.KILLED
    return WorkResult(WorkerOutcome.NORMAL, text, outcome, diff), seconds


def main(session: str) -> None:
    """Judge every mutant that no list of tests has killed yet, from the first list that it has not met."""
    folder = Path(session).resolve().parent
    for number, arguments in enumerate(settings()["tests"], 1):
        seconds = warm_up(arguments, folder)
        limit = int(TIMES_LONGER * seconds) + 10
        print(f"list {number}: {seconds:.0f} s of CPU time; a mutant may take {limit} s", flush=True)
        met = folder / f"met-{number}.txt"
        known = set(met.read_text().split()) if met.exists() else set()
        with use_db(session, WorkDB.Mode.open) as db:
            killed = {job for job, result in db.results if result.is_killed}
            waiting = [item for item in db.work_items if item.job_id not in killed | known]
            for count, item in enumerate(waiting, 1):
                result, used = judge(item, arguments, folder, limit)
                db.set_result(item.job_id, result)
                with met.open("a") as file:
                    print(item.job_id, file=file)
                (mutation,) = item.mutations
                verdict = "slow" if result.output.startswith("too slow") else result.test_outcome.value
                where = f"{mutation.module_path}:{mutation.start_pos[0]}"
                name = mutation.operator_name.removeprefix("core/")
                print(f"{number}: {count}/{len(waiting)} {verdict} {where} {name} ({used:.1f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

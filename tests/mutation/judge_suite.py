"""Judges the mutants of a session by the conformance suite alone, on the platform `cpu`.

python tests/mutation/judge_suite.py SESSION.sqlite REACH.json          (in the root of a copy: files are mutated)

A mutant is judged by the cases that enter the function it is in (`reach.py`): first one parameter set of each case,
then, with --all, the other sets for what survived. A mutant outside of functions is judged by the cases that enter
any function of its file. Verdicts are kept: the command goes on where it was stopped.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem
from judge import TIMES_LONGER, judge, warm_up
from reach import IMPORT

SHORTEST = 60
"""CPU seconds that a mutant may take at least."""


def function_at(path: Path, line: int) -> str | None:
    """Qualified name of the innermost named function around a line, as `code.co_qualname`; None outside of functions.

    Decorators, defaults and annotations run outside of the function they belong to.
    """
    found: str | None = None

    def visit(node: ast.AST, prefix: str) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = prefix + child.name
                if child.body[0].lineno <= line <= (child.end_lineno or 0):
                    found = name
                visit(child, name + ".<locals>.")
            elif isinstance(child, ast.ClassDef):
                visit(child, prefix + child.name + ".")
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text()), "")
    return found


def reaching(reach: dict, path: Path, line: int, all_cases: bool) -> list[str]:
    """The cases that can fail for a mutant at a line: the quickest parameter set of each, or all."""
    function = function_at(path, line)
    cases = set(reach["cases"].get(f"{path} {function}", ()))
    if function is None or IMPORT in cases:  # runs at import: whatever uses the file may show it
        cases.update(*(found for key, found in reach["cases"].items() if key.startswith(f"{path} ")))
    cases.discard(IMPORT)
    if not cases and function is None:
        cases = set(reach["seconds"])
    if all_cases:
        return sorted(cases)
    quickest: dict[str, str] = {}
    for case in sorted(cases, key=reach["seconds"].__getitem__):
        quickest.setdefault(case.partition("[")[0], case)
    return list(quickest.values())


def suite(cases: list[str]) -> list[str]:
    """Arguments for pytest."""
    here = "conformance/specgraph_conformance"
    arguments = ["-c", f"{here}/pytest.ini", "--rootdir", here, here, "--specgraph-platform", "cpu"]
    return [*arguments, "-rf", *(word for case in cases for word in ("--specgraph-case", case))]


def main(session: str, reach_path: str, *options: str) -> None:
    """Judge in an order that is random, so that what is judged at any time is a sample of the sample."""
    folder, reach, all_cases = Path(session).resolve().parent, json.loads(Path(reach_path).read_text()), bool(options)
    warm_up(suite(["capture.runs-nothing", "decoding.sampled-repeats"]), folder)
    with use_db(session, WorkDB.Mode.open) as db:
        results = dict(db.results)
        items = sorted(db.work_items, key=lambda item: (item.mutations[0].module_path, item.mutations[0].start_pos))
        if all_cases:
            items = [item for item in items if item.job_id in results and not results[item.job_id].is_killed]
        else:
            items = [item for item in items if item.job_id not in results]
        random.Random(0).shuffle(items)
        for count, item in enumerate(items, 1):
            _judge(db, item, reach, all_cases, folder, f"{count}/{len(items)}")


def _judge(db: WorkDB, item: WorkItem, reach: dict, all_cases: bool, folder: Path, number: str) -> None:
    (mutation,) = item.mutations
    line = mutation.start_pos[0]
    cases = reaching(reach, mutation.module_path, line, all_cases)
    where = f"{mutation.module_path}:{line} {mutation.operator_name.removeprefix('core/')}"
    if not cases:
        print(f"{number} not reached by any case: {where}", flush=True)
        arguments = suite(["discovery.found-by-entry-point"])
    else:
        arguments = suite(cases)
    limit = SHORTEST + int(TIMES_LONGER * sum(reach["seconds"].get(case, 0) for case in cases))
    result, used = judge(item, arguments, folder, limit)
    failed = [line for line in result.output.splitlines() if line.startswith("FAILED")]
    db.set_result(item.job_id, result)
    print(f"{number} {result.test_outcome.value} {where} ({len(cases)} cases, {used:.1f} s) {failed[:1]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

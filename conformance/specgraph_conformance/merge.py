"""Joins the reports of shards into one, and takes it apart again for `verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError

from specgraph_conformance.report import CaseResult, Report, Shard, digest_of
from specgraph_conformance.shards import as_ranges, from_ranges, shard_of, split
from specgraph_conformance.standard import listed_cases
from specgraph_conformance.verify import read_report

EQUAL = ("platform", "suite", "device", "device_kind", "versions", "capabilities", "seed", "attention", "device_count")
"""Fields of the subject that shards have in common, besides environment (without the day) and sources."""


def merge(paths: Sequence[Path]) -> Report:
    """One report of the shards in these files, with the cases in the order of a run in one piece.

    A shard whose run was interrupted makes the report one of an interrupted run.

    Raises:
        ConfigError: a file is no shard's report, shards differ in what they tested or how, one is there twice or
            missing, or a case is in two of them.
    """
    if not paths:
        raise ConfigError("name the reports to merge: specgraph conformance merge REPORT...")
    reports = {path: _read(path) for path in paths}
    (first, one), *others = reports.items()
    for path, other in others:
        if (difference := _difference(one, other)) is not None:
            name, mine, theirs = difference
            raise ConfigError(f"{path}: {name} is {_short(theirs)}, and {_short(mine)} in {first}")
    _check_all_there(reports)
    cases: dict[int, CaseResult] = {}
    for path, report in reports.items():
        (shard,) = report.shards
        for place, result in zip(from_ranges(shard.places), report.cases, strict=True):
            if place in cases:
                raise ConfigError(f"{path}: case {cases[place].id} is in another of the reports too")
            cases[place] = result
    days = ", ".join(sorted({report.subject.environment["date"] for report in reports.values()}))
    subject = replace(one.subject, environment={**one.subject.environment, "date": days})
    shards = sorted((_kept(report) for report in reports.values()), key=lambda shard: shard.index)
    return Report(subject, [cases[place] for place in sorted(cases)], _problems(shards), shards)


def parts(report: Report) -> Iterator[tuple[Shard, Report]]:
    """Each shard of a merged report, and the shard's own report.

    Raises:
        ValueError: places that are no numbers, or not as many as there are cases.
    """
    everything = sorted(place for shard in report.shards for place in from_ranges(shard.places))
    at = dict(zip(everything, report.cases, strict=True))
    for shard in report.shards:
        environment = {**report.subject.environment, "date": shard.date}
        cases = [at[place] for place in from_ranges(shard.places)]
        alone = replace(shard, date="", problems=(), digest="")
        yield shard, Report(replace(report.subject, environment=environment), cases, shard.problems, [alone])


def shard_problems(report: Report) -> list[str]:
    """What is wrong with the shards of a report; nothing where it is of a run in one piece."""
    if not report.shards:
        return []
    shards, count = report.shards, report.shards[0].count
    if len(shards) == 1 and not shards[0].digest:
        return [f"it is shard {shards[0].index} of {count} only: specgraph conformance merge joins them"]
    indices = [shard.index for shard in shards]
    if sorted({*indices}) != sorted(indices) or {shard.count for shard in shards} != {count}:
        return [f"its shards are {_named(shards)}: not each once, or not of one split"]
    if sum(shard.selected for shard in shards) != shards[0].total:
        return [f"its shards {_named(shards)} had {sum(s.selected for s in shards)} of {shards[0].total} cases to run"]
    try:
        found = [
            f"the results of shard {shard.index} of {count} are not those of its own report"
            for shard, part in parts(report)
            if part.as_json()["digest"] != shard.digest
        ]
        return found + [f"shard {s.index} of {count}: {line}" for s, part in parts(report) for line in _misplaced(part)]
    except ValueError:
        return ["its shards do not say which of its cases are theirs"]


def _misplaced(part: Report) -> list[str]:
    """Cases that the split gives to another shard."""
    (shard,) = part.shards
    known = split(listed_cases(part.subject.suite) or {}, shard.count)
    wrong = [result.id for result in part.cases if shard_of(result.id, known, shard.count) != shard.index]
    return [f"case {wrong[0]} belongs to another shard"] if wrong else []


def _read(path: Path) -> Report:
    report, data = read_report(path)
    if data["digest"] != digest_of(data):
        raise ConfigError(f"{path}: its digest is not that of its content: it was edited or cut after the run")
    if len(report.shards) != 1 or report.shards[0].digest:
        made = "merged already" if report.shards else "of a run in one piece"
        raise ConfigError(f"{path}: not the report of one shard, made with --shard I/N, but {made}")
    try:
        places = from_ranges(report.shards[0].places)
    except ValueError:
        raise ConfigError(f"{path}: its shard has no places but {report.shards[0].places!r}") from None
    if len(places) != len(report.cases):
        raise ConfigError(f"{path}: its shard has {len(places)} places and {len(report.cases)} cases")
    return report


def _difference(one: Report, other: Report) -> tuple[str, object, object] | None:
    """(what differs, in `one`, in `other`) of the first difference."""
    mine, theirs = _compared(one), _compared(other)
    return next(((n, mine.get(n), theirs.get(n)) for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)), None)


def _compared(report: Report) -> dict[str, object]:
    """All that must be equal, by the name that an error gives it."""
    subject, (shard,) = report.subject, report.shards
    out: dict[str, object] = {}
    for name in EQUAL:
        value: Any = getattr(subject, name)
        inner = isinstance(value, Mapping)
        out |= {f"{name}: {key}": each for key, each in value.items()} if inner else {name: value}
    out |= {f"environment: {n}": value for n, value in subject.environment.items() if n != "date"}
    for source in subject.sources:
        out |= {f"{source['distribution']}: {n}": value for n, value in source.items() if n != "distribution"}
    out |= {f"option {name}": value for name, value in shard.options.items()}
    return {**out, "number of shards": shard.count, "number of selected cases": shard.total}


def _check_all_there(reports: Mapping[Path, Report]) -> None:
    seen: dict[int, Path] = {}
    for path, report in reports.items():
        (shard,) = report.shards
        if shard.index in seen:
            raise ConfigError(f"{path}: shard {shard.index} of {shard.count}, and so is {seen[shard.index]}")
        if lines := _misplaced(report):
            raise ConfigError(f"{path}: shard {shard.index} of {shard.count}: {lines[0]}")
        seen[shard.index] = path
    shards = [report.shards[0] for report in reports.values()]
    count, there = shards[0].count, sum(shard.selected for shard in shards)
    if there != shards[0].total:
        missing = as_ranges(index for index in range(1, count + 1) if index not in seen)
        raise ConfigError(
            f"shards {missing} of {count} are missing: those that are there had {there} of {shards[0].total} cases"
        )


def _kept(report: Report) -> Shard:
    (shard,), data = report.shards, report.as_json()
    date = report.subject.environment["date"]
    return replace(shard, date=date, problems=list(report.problems), digest=data["digest"])


def _problems(shards: Sequence[Shard]) -> list[str]:
    """Those of all shards, with the shard where it is one that only some have."""
    every = dict.fromkeys(problem for shard in shards for problem in shard.problems)
    where = {p: [s.index for s in shards if p in s.problems] for p in every}
    return [p if len(i) == len(shards) else f"shard {as_ranges(i)} of {shards[0].count}: {p}" for p, i in where.items()]


def _named(shards: Sequence[Shard]) -> str:
    return ", ".join(f"{shard.index}/{shard.count}" for shard in shards)


def _short(value: object) -> str:
    return "not there" if value is None else repr(value) if not isinstance(value, str) or not value else value

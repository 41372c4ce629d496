"""The result of a run: one `CaseResult` per case, the platform it ran on, counts and verdict."""

from __future__ import annotations

import builtins
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from specgraph_conformance.case import Case

Outcome = Literal["passed", "failed", "xfailed", "absent"]
UNSTATED = "not said by the backend"
"""Shown if `PlatformInfo.device_kind` is empty."""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "xfailed", "absent")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case."""

    id: str
    property: str
    hazard: str | None
    outcome: Outcome
    reason: str = ""
    """The reason why the case failed, was expected to fail, or is absent. Empty if it passed."""
    cause: str = ""
    """The likely cause of a failure."""

    @builtins.property
    def group(self) -> str:
        """The part of the id before the first dot."""
        return self.id.partition(".")[0]


def result_of(case: Case, outcome: Outcome, reason: str = "") -> CaseResult:
    """Return the result of a case."""
    return CaseResult(case.id, case.property, case.hazard, outcome, reason, case.cause)


@dataclass(frozen=True, slots=True)
class Subject:
    """The tested platform. `capabilities` maps each name to {"level": yes | no | quirk, "reason": ...}."""

    platform: str
    device: str
    device_kind: str
    """The hardware, or the name of its simulator, in the backend's words."""
    versions: Mapping[str, str]
    capabilities: Mapping[str, Any]
    seed: int
    suite: str = ""
    """The version of the standard, `standard.SUITE_VERSION`."""
    attention: Sequence[str] = ()
    """The names of the device's own attention backends."""
    device_count: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Python, operating system, machine, date."""
    sources: Sequence[Mapping[str, Any]] = ()
    """The fields of a `Source` for the core, for the suite and for the backend."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the suite."""

    subject: Subject
    cases: Sequence[CaseResult]
    problems: Sequence[str] = field(default_factory=tuple)
    """Errors that belong to no case, such as entries of xfails.toml that match no case."""
    interrupted: bool = False
    """True if Ctrl-C or an outside time limit ended the run. `problems` then says how many cases ran."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases by outcome."""
        seen = Counter(result.outcome for result in self.cases)
        return {outcome: seen[outcome] for outcome in OUTCOMES}

    @property
    def failures(self) -> list[CaseResult]:
        """The failures that xfails.toml does not declare, in the order of the suite."""
        return [result for result in self.cases if result.outcome == "failed"]

    @property
    def is_green(self) -> bool:
        """True if at least one case passed, and there are no undeclared failures and no `problems`."""
        return self.counts["passed"] > 0 and not self.failures and not self.problems

    def rerun_command(self, result: CaseResult) -> str:
        """Return the command that runs only this case."""
        return f"specgraph conformance {self.subject.platform} --case {shlex.quote(result.id)}"


def as_record(report: Report) -> dict[str, Any]:
    """Return the data of a report for a file, with a digest over all of it: ids of passed cases by group, outcome and
    reason of the others. Everything else about a case follows from the suite."""
    passed: dict[str, list[str]] = {}
    for result in report.cases:
        if result.outcome == "passed":
            passed.setdefault(result.group, []).append(result.id)
    rest = [{"id": r.id, "outcome": r.outcome, "reason": r.reason} for r in report.cases if r.outcome != "passed"]
    counted = {"counts": report.counts, "problems": list(report.problems)}
    data = {**asdict(report.subject), **counted, "passed": passed, "cases": rest}
    return {**data, "digest": digest_of(data)}


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a report's data without its digest. It shows an edited or cut file, but is no signature."""
    plain = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def from_json(data: Mapping[str, Any]) -> Report:
    """Return the report from the data of `as_record`. Its cases have no properties, hazards, causes or times.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    subject = Subject(**{field.name: data[field.name] for field in fields(Subject)})
    found = [{"id": id, "outcome": "passed"} for ids in data["passed"].values() for id in ids] + data["cases"]
    cases = [CaseResult(property="", hazard=None, **case) for case in found]
    return Report(subject, cases, data["problems"])

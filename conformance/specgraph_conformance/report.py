"""The result of a run: one `CaseResult` per case, the platform it ran on, counts and verdict."""

from __future__ import annotations

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
"""Shown where `PlatformInfo.device_kind` is empty."""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "xfailed", "absent")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case."""

    id: str
    group: str
    property: str
    hazard: str | None
    outcome: Outcome
    reason: str = ""
    """The reason why it failed, was expected to, or is absent; empty when passed."""
    cause: str = ""
    """The likely cause, for failed cases."""
    seconds: float = 0.0
    """Wall time with set-up and compilation; 0 where it is not known, as of a case that ended its process."""


def result_of(case: Case, outcome: Outcome, reason: str = "", seconds: float = 0.0) -> CaseResult:
    """Return how a case ended."""
    return CaseResult(case.id, case.group, case.property, case.hazard, outcome, reason, case.cause, seconds)


@dataclass(frozen=True, slots=True)
class Subject:
    """The platform that was tested. `capabilities` maps each name to {"level": yes | no | quirk, "reason": ...}."""

    platform: str
    device: str
    device_kind: str
    """Hardware, or the name of what simulates it, in the backend's words."""
    versions: Mapping[str, str]
    capabilities: Mapping[str, Any]
    seed: int
    suite: str = ""
    """Version of the standard, `standard.SUITE_VERSION`."""
    attention: Sequence[str] = ()
    """Names of the device's own attention backends."""
    device_count: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Python, operating system, machine, date."""
    sources: Sequence[Mapping[str, Any]] = ()
    """A `Source` each for the core, the suite and the backend."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the suite."""

    subject: Subject
    cases: Sequence[CaseResult]
    problems: Sequence[str] = field(default_factory=tuple)
    """Errors that belong to no case: entries of xfails.toml that match no case."""
    interrupted: bool = False
    """True where Ctrl-C or a time limit from outside ended the run; `problems` says how many cases ran."""

    @property
    def counts(self) -> dict[str, int]:
        """Cases by outcome."""
        seen = Counter(result.outcome for result in self.cases)
        return {outcome: seen[outcome] for outcome in OUTCOMES}

    @property
    def failures(self) -> list[CaseResult]:
        """Undeclared failures, in the order of the suite."""
        return [result for result in self.cases if result.outcome == "failed"]

    @property
    def is_green(self) -> bool:
        """At least one case passed, none failed that xfails.toml does not declare, and there are no `problems`."""
        return self.counts["passed"] > 0 and not self.failures and not self.problems

    def rerun_command(self, result: CaseResult) -> str:
        """The command that runs only this case."""
        return f"specgraph conformance {self.subject.platform} --case {shlex.quote(result.id)}"

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`, with a digest over all of it."""
        cases = [asdict(result) for result in self.cases]
        for data, result in zip(cases, self.cases, strict=True):
            if result.outcome == "failed":
                data["rerun"] = self.rerun_command(result)
            else:
                del data["cause"]
        counted = {"counts": self.counts, "problems": list(self.problems)}
        data = {**asdict(self.subject), **counted, "cases": cases}
        return {**data, "digest": digest_of(data)}


def digest_of(data: Mapping[str, Any]) -> str:
    """SHA-256 of a report's data without its digest. It shows an edit or a cut file; it is no signature."""
    plain = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def from_json(data: Mapping[str, Any]) -> Report:
    """The report that `as_json` wrote.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    subject = Subject(**{field.name: data[field.name] for field in fields(Subject)})
    cases = [CaseResult(**{name: v for name, v in case.items() if name != "rerun"}) for case in data["cases"]]
    return Report(subject, cases, data["problems"])

"""The result of a run: one record a case, what it ran on, and what it comes to."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "xfailed", "absent"]
UNSTATED = "not said by the backend"
"""Stands for an empty `PlatformInfo.device_kind`."""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "xfailed", "absent")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case ended."""

    id: str
    group: str
    property: str
    hazard: str | None
    outcome: Outcome
    reason: str = ""
    """Why it failed, was expected to, or is absent; empty when passed."""
    cause: str = ""
    """The likely cause, for failed cases."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was tested. `capabilities` maps each name to {"level": yes | no | quirk, "reason": ...}."""

    platform: str
    device: str
    device_kind: str
    """What stands behind the device's name, in the backend's words: hardware, or what stands in for it."""
    versions: Mapping[str, str]
    capabilities: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the suite."""

    subject: Subject
    cases: Sequence[CaseResult]
    problems: Sequence[str] = field(default_factory=tuple)
    """What is wrong beside the cases: a declared gap that matches nothing."""

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
        """Something was tested, and nothing undeclared failed."""
        return self.counts["passed"] > 0 and not self.failures and not self.problems

    def rerun_command(self, result: CaseResult) -> str:
        """Runs just this case."""
        return f"specgraph conformance {self.subject.platform} --case {shlex.quote(result.id)}"

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        cases = [asdict(result) for result in self.cases]
        for data, result in zip(cases, self.cases, strict=True):
            if result.outcome == "failed":
                data["rerun"] = self.rerun_command(result)
            else:
                del data["cause"]
        return {**asdict(self.subject), "counts": self.counts, "problems": list(self.problems), "cases": cases}

"""The versioned standard: which cases a suite of this version has, and what a backend must pass for each profile.

A report "conforms to drafting 3.0" when every case of that profile is in it and passed, or is absent for a reason that
the profile allows. The version is apart from those of the packages. A minor version only adds cases, so that reports of
3.0 are still judged by the cases of 3.0 in a suite of 3.1; a major version begins a new list, and reports of another
one are judged by the suite that made them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from specgraph_conformance.case import CORE_ATTENTION
from specgraph_conformance.report import CaseResult, Report

SUITE_VERSION = "3.0"
LISTS = Path(__file__).parent / "lists"
"""A file per minor version, `3.0.json`, with the cases that it adds to those before it."""
FROZEN: Mapping[str, str] = json.loads((LISTS / "frozen.json").read_text(encoding="utf-8"))
"""`digest_of` the file of each released version: from then on the version has these cases and no others."""
VERSIONS = [f"{SUITE_VERSION.partition('.')[0]}.{minor}" for minor in range(int(SUITE_VERSION.partition(".")[2]) + 1)]
"""The versions that this suite knows, in order; the last is its own."""
ATTENTION = "{attention}"
"""The place, in a parameter set, of any attention backend, one of the core's or of the device's own."""
BASE = ("discovery", "device", "streams", "capture", "replay")


@dataclass(frozen=True, slots=True)
class Profile:
    """A part of the standard that a backend can conform to."""

    name: str
    about: str
    groups: tuple[str, ...]
    """All cases of these groups must pass, or be absent for want of a capability that is not in `requires`."""
    requires: tuple[str, ...]
    """Capabilities that the platform must have."""


PROFILES = (
    Profile("graphs", "capture, replay, memory pools, streams and events", BASE, ("graphs",)),
    Profile(
        "task-update",
        "profile graphs, and host parameters of captured ops rewritten between replays",
        (*BASE, "task_update"),
        ("graphs", "task_update"),
    ),
    Profile(
        "drafting",
        "profile graphs, and every kind of drafter decoding through graphs with the draft ops and attention",
        (*BASE, "task_update", "kernels", "attention", "drafting", "decoding", "faults"),
        ("graphs",),
    ),
    Profile(
        "parallel",
        "profile drafting, and collectives between devices inside captured graphs",
        (*BASE, "task_update", "kernels", "attention", "drafting", "decoding", "faults", "collectives"),
        ("graphs", "collectives_in_graph"),
    ),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """One case of the standard."""

    needs: tuple[str, ...] = ()
    """Capabilities without which the case is absent."""
    unless: tuple[str, ...] = ()
    """Capabilities with which the case is absent."""
    parameters: tuple[str, ...] = ()
    """Its parameter sets; empty where it has none."""


def digest_of(cases: str) -> str:
    """SHA-256 of a list of cases as it is written."""
    return hashlib.sha256(cases.encode()).hexdigest()


@cache
def listed_cases(version: str = SUITE_VERSION) -> Mapping[str, Listed]:
    """Return the cases of a version by id without parameters."""
    out: dict[str, Listed] = {}
    for name in VERSIONS[: VERSIONS.index(version) + 1]:
        for id, fields in json.loads((LISTS / f"{name}.json").read_text(encoding="utf-8")).items():
            added = Listed(**{key: tuple(value) for key, value in fields.items()})
            out[id] = replace(added, parameters=(*out[id].parameters, *added.parameters)) if id in out else added
    return out


def expected_ids(own_attention: Sequence[str], version: str = SUITE_VERSION) -> dict[str, Listed]:
    """Return every id with its parameters on a device with these attention backends of its own."""
    out: dict[str, Listed] = {}
    for id, listed in listed_cases(version).items():
        if not listed.parameters:
            out[id] = listed
        for parameters in listed.parameters:
            names = (*CORE_ATTENTION, *own_attention) if ATTENTION in parameters else ("",)
            out.update({f"{id}[{parameters.replace(ATTENTION, name)}]": listed for name in names})
    return out


def unknown_version(version: str) -> str:
    """Say that a report is of a version whose cases this suite does not know; empty where it knows them."""
    if version in VERSIONS:
        return ""
    return (
        f"it is of suite {version or 'not stated'}, and this is {SUITE_VERSION}: verify it with the suite that made it"
    )


@dataclass(frozen=True, slots=True)
class Conformance:
    """The answer of a report to one profile."""

    profile: str
    missing: tuple[str, ...]
    """The missing things, one line each; empty where it conforms."""
    claimed: bool = True
    """False where a required capability is absent: no fault, only a device that this profile is not for."""

    @property
    def conforms(self) -> bool:
        """True where nothing is missing."""
        return not self.missing


def conformance(report: Report) -> list[Conformance]:
    """One answer for each profile, from the cases and capabilities of a report alone."""
    if other := unknown_version(report.subject.suite):
        return [Conformance(profile.name, (other,)) for profile in PROFILES]
    expected = expected_ids(report.subject.attention, report.subject.suite)
    seen = {result.id: result for result in report.cases}
    return [_conformance(profile, report, expected, seen) for profile in PROFILES]


def _conformance(
    profile: Profile, report: Report, expected: Mapping[str, Listed], seen: Mapping[str, CaseResult]
) -> Conformance:
    capabilities = report.subject.capabilities
    absent = [name for name in profile.requires if level(capabilities, name) == "no"]
    if absent:
        return Conformance(
            profile.name, tuple(f"{name}: {capabilities[name]['reason']}" for name in absent), claimed=False
        )
    missing = list(report.problems)
    not_run = 0
    for id, listed in expected.items():
        if id.partition(".")[0] not in profile.groups:
            continue
        result = seen.get(id)
        if result is None:
            not_run += 1
        elif result.outcome == "failed":
            missing.append(f"{id} failed")
        elif result.outcome == "xfailed" and not set(listed.needs) - set(profile.requires):
            missing.append(f"{id} is a declared gap")
        elif result.outcome == "absent":
            why = justification(result, listed, report)
            if why is None:
                missing.append(f"{id} is absent, and no capability says why")
            elif why in profile.requires:
                missing.append(f"{id} is absent although {why} is required")
    if not_run:
        missing.append(f"{not_run} cases were not run")
    return Conformance(profile.name, tuple(missing))


def justification(result: CaseResult, listed: Listed, report: Report) -> str | None:
    """Return what an absence follows from; None if from nothing that the report says.

    It is the name of an absent capability, "NAME is there", "attention" (the backend refuses the case's shape or has
    lengths of the other kind), "one device" or "memory".
    """
    capabilities, reason = report.subject.capabilities, result.reason
    for name in listed.needs:
        if level(capabilities, name) == "no":
            return name
    for name in listed.unless:
        if level(capabilities, name) != "no":
            return f"{name} is there"
    for name, about in capabilities.items():
        if about["level"] == "no" and about["reason"] and about["reason"] in reason:
            return name
    if "two devices" in reason and report.subject.device_count < 2:
        return "one device"
    if reason.startswith("no memory for "):
        return "memory"
    parameters = f"-{result.id.partition('[')[2].removesuffix(']')}-"
    others = any(f"-{name}-" in parameters for name in ("paged-host", *report.subject.attention))
    if "attention" in reason and (others or "-paged-" not in parameters):
        return "attention"
    return None


def level(capabilities: Mapping[str, Any], name: str) -> str:
    """`yes`, `quirk` or `no`; `no` for a capability that the report does not have."""
    return capabilities.get(name, {"level": "no"})["level"]


def summary(report: Report) -> str:
    """Such as "graphs and drafting 3.0"; empty where it conforms to nothing."""
    names = [answer.profile for answer in conformance(report) if answer.conforms]
    if not names:
        return ""
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)} {report.subject.suite}"

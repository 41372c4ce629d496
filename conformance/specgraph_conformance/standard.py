"""The versioned standard: the cases of each version of the suite, and the cases that a backend must pass per profile.

A report "conforms to drafting 3.0" if every case of that profile is in it, and each passed or is absent for a reason
that the profile allows. The version is independent of the packages' versions. Each has its whole list in `lists`, so
a suite of 3.1 still judges reports of 3.0 by the cases of 3.0. Reports of a version without a list here are judged by
the suite that made them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specgraph_conformance.case import CORE_ATTENTION
from specgraph_conformance.report import CaseResult, Report

SUITE_VERSION = "3.0"
LISTS = Path(__file__).parent / "lists"
"""The folder with the list of cases of each version, such as `3.0.json`."""
ATTENTION = "{attention}"
"""Stands, in a parameter set, for any attention backend, the core's or the device's own."""
BASE = ("discovery", "device", "streams", "capture", "replay")


@dataclass(frozen=True, slots=True)
class Profile:
    """A part of the standard that a backend can conform to."""

    name: str
    about: str
    groups: tuple[str, ...]
    """All cases of these groups must pass, or be absent because a capability outside `requires` is missing."""
    requires: tuple[str, ...]
    """The capabilities that the platform must have."""


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
    """The capabilities that the case requires. It is absent without one of them."""
    unless: tuple[str, ...] = ()
    """The capabilities that the platform must lack. The case is absent with one of them."""
    parameters: tuple[str, ...] = ()
    """The parameter sets of the case. Empty if it has none."""


@cache
def listed_cases(version: str = SUITE_VERSION) -> Mapping[str, Listed]:
    """Return the cases of a version, by id without parameters."""
    listed = json.loads((LISTS / f"{version}.json").read_text(encoding="utf-8"))
    return {id: Listed(**{key: tuple(value) for key, value in fields.items()}) for id, fields in listed.items()}


def expected_ids(own_attention: Sequence[str], version: str = SUITE_VERSION) -> dict[str, Listed]:
    """Return the cases by id with parameters, for a device with these attention backends of its own."""
    out: dict[str, Listed] = {}
    for id, listed in listed_cases(version).items():
        if not listed.parameters:
            out[id] = listed
        for parameters in listed.parameters:
            names = (*CORE_ATTENTION, *own_attention) if ATTENTION in parameters else ("",)
            out.update({f"{id}[{parameters.replace(ATTENTION, name)}]": listed for name in names})
    return out


def unknown_version(version: str) -> str:
    """Return a sentence if this suite does not know the cases of a report's version. Otherwise return ""."""
    if version in {path.stem for path in LISTS.iterdir()}:
        return ""
    return (
        f"it is of suite {version or 'not stated'}, and this is {SUITE_VERSION}: verify it with the suite that made it"
    )


@dataclass(frozen=True, slots=True)
class Conformance:
    """The judgement of a report by one profile."""

    profile: str
    missing: tuple[str, ...]
    """The missing things, one line each. Empty if the report conforms."""
    claimed: bool = True
    """False if the device lacks a required capability. This is no fault: the profile is not for such devices."""

    @property
    def conforms(self) -> bool:
        """True if nothing is missing."""
        return not self.missing


def conformance(report: Report) -> list[Conformance]:
    """Return the answer for each profile. It depends on the cases and capabilities of the report alone."""
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
    """Return the fact in the report that explains why a case is absent. None if no fact does.

    It is the name of an absent capability, "NAME is there", "attention" (the backend refuses the case's shape or takes
    lengths from another place), "one device" or "memory".
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
    """Return a capability's level: `yes`, `quirk` or `no`. A capability that the report lacks has `no`."""
    return capabilities.get(name, {"level": "no"})["level"]


def summary(report: Report) -> str:
    """Return the profiles that the report conforms to, such as "graphs and drafting 3.0". Empty if there are none."""
    names = [answer.profile for answer in conformance(report) if answer.conforms]
    if not names:
        return ""
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)} {report.subject.suite}"

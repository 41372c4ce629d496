"""The versioned standard: its list of cases, what is added in which version, and what conforms to which profile."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from conformance.reports import complete_report
from specgraph_conformance.case import GROUPS
from specgraph_conformance.case_list import collect
from specgraph_conformance.report import CaseResult, Outcome, Report
from specgraph_conformance.standard import FOLDER, PROFILES, SUITE_VERSION, conformance, listed_cases, summary


def answers(report: Report) -> dict[str, tuple[str, ...]]:
    return {answer.profile: answer.missing for answer in conformance(report)}


def changed(report: Report, id: str, outcome: Outcome, reason: str = "") -> Report:
    """The report with another outcome of one case."""
    assert any(result.id == id for result in report.cases)
    cases = [replace(r, outcome=outcome, reason=reason) if r.id == id else r for r in report.cases]
    return replace(report, cases=cases)


def without(report: Report, id: str) -> Report:
    return replace(report, cases=[result for result in report.cases if result.id != id])


def test_the_list_of_this_version_is_what_the_suite_has() -> None:
    committed = json.loads((FOLDER / f"{SUITE_VERSION}.json").read_text())
    collected = json.loads(collect())
    assert committed == collected, (
        "cases were added, removed or changed: python -m specgraph_conformance.case_list > "
        f"conformance/specgraph_conformance/standard/{SUITE_VERSION}.json (a released version needs a new one)"
    )


def versions() -> list[tuple[int, int]]:
    return sorted(
        (int(major), int(minor)) for major, _, minor in (p.stem.partition(".") for p in FOLDER.glob("*.json"))
    )


def test_a_minor_version_only_adds() -> None:
    for older, newer in pairwise(versions()):
        if older[0] != newer[0]:
            continue
        before, after = (listed_cases(f"{major}.{minor}") for major, minor in (older, newer))
        assert before is not None
        assert after is not None
        for id, listed in before.items():
            assert id in after, f"{newer} has no {id}: that takes a major version"
            assert set(listed.parameters) <= set(after[id].parameters), id
            assert (listed.needs, listed.unless) == (after[id].needs, after[id].unless), id


def test_every_group_is_in_a_profile() -> None:
    assert {group for profile in PROFILES for group in profile.groups} == set(GROUPS)
    assert f"{SUITE_VERSION}.json" in {Path(path).name for path in FOLDER.glob("*.json")}


def test_all_passed_conforms_to_all() -> None:
    report = complete_report()
    assert answers(report) == {"graphs": (), "task-update": (), "drafting": (), "parallel": ()}
    assert summary(report) == f"graphs, task-update, drafting and parallel {SUITE_VERSION}"


def test_a_device_without_a_profile_s_capability_does_not_claim_it() -> None:
    report = complete_report(absent=("task_update", "collectives_in_graph"))
    claimed = {answer.profile: answer.claimed for answer in conformance(report)}
    assert claimed == {"graphs": True, "task-update": False, "drafting": True, "parallel": False}
    assert summary(report) == f"graphs and drafting {SUITE_VERSION}"
    assert answers(report)["parallel"] == ("collectives_in_graph: why collectives_in_graph is so",)


@pytest.mark.parametrize(
    ("id", "profiles"),
    [
        ("capture.runs-nothing", {"graphs", "task-update", "drafting", "parallel"}),
        ("task_update.takes-effect", {"task-update", "drafting", "parallel"}),
        ("decoding.sampled-repeats", {"drafting", "parallel"}),
        ("collectives.gather-in-graph", {"parallel"}),
    ],
)
def test_one_case_decides_the_profiles_that_have_its_group(id: str, profiles: set[str]) -> None:
    report = complete_report()
    for worse in (changed(report, id, "failed"), without(report, id), changed(report, id, "absent", "not today")):
        missing = {profile for profile, lines in answers(worse).items() if lines}
        assert missing == profiles


def test_a_declared_gap_counts_unless_its_capability_is_the_device_s_choice() -> None:
    report = complete_report()
    gap = changed(report, "capture.runs-nothing", "xfailed", "known")
    assert "capture.runs-nothing is a declared gap" in answers(gap)["graphs"]
    optional = changed(report, "streams.external-record-is-seen-outside", "xfailed", "one wait for a record")
    assert answers(optional)["graphs"] == ()


def test_a_partial_run_conforms_to_nothing() -> None:
    report = complete_report()
    part = replace(report, cases=[result for result in report.cases if result.group == "discovery"])
    assert not summary(part)
    assert "cases were not run" in answers(part)["graphs"][0]


def test_own_attention_adds_its_parameter_sets() -> None:
    plain, own = complete_report(), complete_report(own_attention=("acme-fast",))
    added = {result.id for result in own.cases} - {result.id for result in plain.cases}
    assert len(added) > 50
    assert all("acme-fast" in id for id in added)
    assert answers(own)["drafting"] == ()
    hidden: list[CaseResult] = [result for result in own.cases if "acme-fast" not in result.id]
    assert answers(replace(own, cases=hidden))["drafting"] == (f"{len(added)} cases were not run",)


def test_an_unknown_version_conforms_to_nothing() -> None:
    assert answers(complete_report(suite="9.0"))["graphs"] == ("suite version 9.0 is not known",)

"""The versioned standard: its list of cases, and what conforms to which profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from specgraph_conformance import standard
from specgraph_conformance.case import GROUPS
from specgraph_conformance.case_list import as_json, collect
from specgraph_conformance.render import verdict
from specgraph_conformance.report import CaseResult, Outcome, Report
from specgraph_conformance.standard import PROFILES, SUITE_VERSION, Listed, conformance, listed_cases, summary

from conformance.reports import complete_report


def answers(report: Report) -> dict[str, tuple[str, ...]]:
    return {answer.profile: answer.missing for answer in conformance(report)}


def changed(report: Report, id: str, outcome: Outcome, reason: str = "") -> Report:
    """The report with another outcome of one case."""
    assert any(result.id == id for result in report.cases)
    cases = [replace(r, outcome=outcome, reason=reason) if r.id == id else r for r in report.cases]
    return replace(report, cases=cases)


def without(report: Report, id: str) -> Report:
    return replace(report, cases=[result for result in report.cases if result.id != id])


def test_the_list_is_what_the_suite_has() -> None:
    assert collect() == listed_cases(), "write it: python -m specgraph_conformance.case_list"


def test_a_report_is_judged_by_the_list_of_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = {"replay.a": Listed(parameters=("x",))}
    second = {"replay.a": Listed(parameters=("x", "y")), "replay.b": Listed()}
    monkeypatch.setattr(standard, "LISTS", tmp_path)
    (tmp_path / "9.0.json").write_text(as_json(first))
    (tmp_path / "9.1.json").write_text(as_json(second))
    assert (listed_cases("9.0"), listed_cases("9.1")) == (first, second)
    whole = complete_report(version="9.1")
    old = replace(whole, subject=replace(whole.subject, suite="9.0"))
    assert answers(replace(old, cases=[r for r in whole.cases if r.id == "replay.a[x]"]))["graphs"] == ()
    assert answers(replace(whole, cases=whole.cases[:1]))["graphs"] == ("2 cases were not run",)


def test_the_verdict_on_a_report_of_an_unknown_suite_says_so() -> None:
    whole = complete_report()
    other = replace(whole, subject=replace(whole.subject, suite="1.6"))
    assert "it is of suite 1.6" in verdict(other)


def test_every_group_is_in_a_profile() -> None:
    assert {group for profile in PROFILES for group in profile.groups} == set(GROUPS)


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


def test_a_device_whose_captures_have_one_stream_may_leave_out_forks() -> None:
    able, unable = complete_report(), complete_report(absent=("fork_in_capture",))
    for id in ("capture.fork-and-join", "capture.unjoined-fork-refused"):
        reason = "fork_in_capture: why fork_in_capture is so"
        unable = changed(unable, id, "absent", reason)
        assert answers(changed(able, id, "absent", reason))["graphs"], "claimed, and absent"
    assert answers(unable)["graphs"] == answers(unable)["parallel"] == ()
    assert answers(changed(unable, "capture.fork-refused-if-absent", "failed"))["graphs"]


def test_a_device_too_small_for_large_caches_may_leave_them_out() -> None:
    small = changed(complete_report(), "attention.keys-past-31-bits[paged]", "absent", "no memory for 9 bytes: why")
    assert answers(small)["drafting"] == ()


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


def test_a_report_of_another_version_conforms_to_nothing() -> None:
    said = f"it is of suite 1.6, and this is {SUITE_VERSION}: verify it with the suite that made it"
    assert answers(complete_report(suite="1.6"))["graphs"] == (said,)

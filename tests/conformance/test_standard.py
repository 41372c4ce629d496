"""The versioned standard: its list of cases, what is added in which version, and what conforms to which profile."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from conformance.reports import complete_report
from specgraph_conformance.case import GROUPS, Case
from specgraph_conformance.case_list import added, collect, removed
from specgraph_conformance.report import CaseResult, Outcome, Report
from specgraph_conformance.session import open_session
from specgraph_conformance.standard import (
    FOLDER,
    PROFILES,
    SUITE_VERSION,
    Listed,
    conformance,
    earlier_minor_version,
    expected_ids,
    known_versions,
    listed_cases,
    summary,
)
from specgraph_conformance.verify import read_report

from specgraph.errors import ConfigError

ROOT = Path(__file__).parents[2]


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
    listed, collected = listed_cases(SUITE_VERSION), collect()
    assert listed is not None
    assert removed(listed, collected) == []
    assert added(listed, collected) == {}, "cases were added: python -m specgraph_conformance.case_list"


FROZEN = {
    "1.0": "5ed4d41790577b7727ce95090843c7084e908197e2e34edd1f46aca6262f3db1",
    "1.1": "d9fdaa924c7f88bd0a162e6c7662ff6dfe89d71655db5e4ef45eb34c684cbadf",
    "1.2": "39eece31203a5c51fb64981c5d131e5127efdc6a71e1343e345cdb149371322d",
    "1.3": "009384887c2f38997e91c0ad13ff3f6ee974e8ac58675a013361a06e66dc2583",
    "1.4": "0d1ba731b0922a939fe36da16afc4358eff03c8508bf0dfa1225fb188117765c",
    "1.5": "600a049786220484d9ac45943c6bb177a943744bad792145a8ee82bac72b00f4",
    "1.6": "da9d7d63870ac5e319624fa73973aad308d9d48e9176a64edf8161b2c8d34f16",
}
"""SHA-256 of the lists of the versions that others have reports of."""


def test_the_lists_that_others_have_reports_of_do_not_change() -> None:
    assert known_versions() == [*dict.fromkeys([*FROZEN, SUITE_VERSION])]
    for version, digest in FROZEN.items():
        assert hashlib.sha256((FOLDER / f"{version}.json").read_bytes()).hexdigest() == digest, version


def test_a_minor_version_only_adds() -> None:
    for version in known_versions():
        earlier = earlier_minor_version(version)
        if earlier is None:
            continue
        before, after = listed_cases(earlier), listed_cases(version)
        assert before is not None
        assert after is not None
        assert removed(before, after) == []
        assert set(expected_ids(before, ())) <= set(expected_ids(after, ()))


ONE = {"replay.one": Listed(), "replay.two": Listed(("task_update",), (), ("a", "b"))}


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ({"replay.two": ONE["replay.two"]}, "replay.one is not there"),
        ({**ONE, "replay.two": Listed((), (), ("a", "b"))}, "replay.two has other needs"),
        ({**ONE, "replay.two": Listed(("task_update",), (), ("b", "c"))}, "replay.two[a] is not there"),
        ({**ONE, "replay.two": Listed(("task_update",))}, "replay.two has no parameter sets"),
        ({**ONE, "replay.one": Listed(parameters=("a",))}, "replay.one has now parameter sets"),
    ],
)
def test_a_removed_or_changed_case_is_named(cases: dict[str, Listed], said: str) -> None:
    assert removed(ONE, cases) == [said]


def test_only_what_is_new_is_listed_as_added() -> None:
    more = {**ONE, "replay.two": Listed(("task_update",), (), ("b", "c", "a")), "replay.three": Listed(unless=("x",))}
    assert removed(ONE, more) == []
    assert added(ONE, more) == {"replay.two": Listed(parameters=("c",)), "replay.three": Listed(unless=("x",))}


def test_a_report_is_judged_by_the_version_that_made_it() -> None:
    first, newest = complete_report(suite="1.0"), complete_report()
    assert len(first.cases) < len(newest.cases)
    assert summary(first) == "graphs, task-update, drafting and parallel 1.0"
    claims_too_much = replace(first, subject=newest.subject)
    assert f"{len(newest.cases) - len(first.cases)} cases were not run" in answers(claims_too_much)["parallel"]


def test_a_run_of_an_earlier_version_has_its_cases_only() -> None:
    run = open_session("cpu", suite="1.0")
    assert run.subject.suite == "1.0"
    assert run.has(Case("drafting.every-head-follows-float64[paged-eagle3]", "", ""))
    assert not run.has(Case("drafting.two-modules-follow-float64[paged]", "", ""))
    run.platform.close()
    with pytest.raises(
        ConfigError, match=r"there is no suite version '0.9' here; there are 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 2.0"
    ):
        open_session("cpu", suite="0.9")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "conformance").glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_reports_are_of_a_known_version(path: Path) -> None:
    report, _ = read_report(path)
    assert report.subject.suite in known_versions()


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

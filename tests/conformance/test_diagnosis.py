"""Failures of one cause are one entry of the summary, and where to look follows from what was seen."""

from __future__ import annotations

import io
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import strategies
from specgraph_conformance.diagnosis import by_cause, look_at
from specgraph_conformance.draft_comparison import assert_same, steps_of_slots
from specgraph_conformance.draft_rig import HostBatch
from specgraph_conformance.plugin import _failure
from specgraph_conformance.render import SHOWN, as_markdown, print_report
from specgraph_conformance.report import CaseResult, Report
from specgraph_conformance.state_machines import Machine, run_machine, step

from conformance.reports import complete_report
from specgraph.errors import ConfigError


def failed(id: str, reason: str, cause: str = "the case's own guess") -> CaseResult:
    return CaseResult(id, "a property", None, "failed", reason, cause)


MISSING = "NotImplementedError: stream(): a new stream (at platform.py:40)"
FAILURES = [
    failed("streams.current-is-per-thread", MISSING),
    failed("streams.many-streams", MISSING),
    failed(
        "replay.op-equals-eager[linear]",
        "AssertionError: the result: 3 of 9 values differ, the first at [0, 1]: 4.5 instead of 2 (at rig.py:40)",
    ),
    failed(
        "replay.op-equals-eager[bmm]",
        "AssertionError: the result: 7 of 8 values differ, the first at [2]: -1e-05 instead of nan (at rig.py:40)",
    ),
    failed(
        "replay.outputs-stay-in-place",
        "AssertionError: the sum: 3 of 9 values differ, the first at [0, 1]: 4 instead of 2 (at rig.py:40)",
    ),
]


def test_failures_that_saw_the_same_are_one_group() -> None:
    ids = [[result.id for result in group] for group in by_cause(FAILURES)]
    assert ids == [
        ["streams.current-is-per-thread", "streams.many-streams"],
        ["replay.op-equals-eager[linear]", "replay.op-equals-eager[bmm]"],
        ["replay.outputs-stay-in-place"],
    ]


def test_what_was_seen_has_no_hint_of_pytest() -> None:
    def body() -> None:
        assert [1, 2] == [1, 3]

    seen = _failure(Mock(when="call"), pytest.CallInfo.from_call(body, "call"))
    assert seen.startswith("AssertionError: assert [1, 2] == [1, 3]\n")
    assert "At index 1" in seen
    assert "Use -v" not in seen


def test_an_error_that_did_not_come_is_a_sentence() -> None:
    def body() -> None:
        with pytest.raises(ConfigError):
            pass

    seen = _failure(Mock(when="call"), pytest.CallInfo.from_call(body, "call"))
    assert seen.startswith("no error came where the case expects ConfigError (at test_diagnosis.py:")
    assert look_at(failed("a.b", seen)) == "a check that is missing; the case's own guess"


def test_a_failure_that_does_not_repeat_has_its_steps() -> None:
    class Once(Machine):
        @step(number=strategies.integers(0, 3))
        def add(self, number: int) -> None:
            if not self.failures:
                raise ValueError("not again")

    with pytest.raises(AssertionError, match=r"not when .* run again: ValueError: not again; after: add\(number="):
        run_machine(Once, {}, seed=0, examples=3, steps=3)


def test_the_draft_step_whose_keys_differ_first_is_named() -> None:
    batch = HostBatch(torch.zeros(1, 3), [2], [5], torch.zeros(1), [[3, 1]], torch.zeros(1), torch.zeros(1))
    steps = steps_of_slots([batch, batch], block_size=4, offset=0)
    assert (steps[1, 1], steps[1, 3]) == ([1, 0, 0], [1, 1, 0])  # positions 5 and 7
    right = torch.zeros(4, 4, 1, 2)
    wrong = right.clone()
    wrong[1, 3] = 1.0
    with pytest.raises(AssertionError, match=r"^keys of layer 0, first in round 1 at draft step 1 of request 0: 2 of"):
        assert_same(([], [(wrong, right)]), ([], [(right, right)]), steps)


def test_bare_failures_of_two_cases_stay_apart() -> None:
    assert len(by_cause([failed("a.b", "AssertionError"), failed("a.c", "AssertionError")])) == 2


def test_where_to_look_follows_from_what_was_seen() -> None:
    assert look_at(FAILURES[0]) == "a method of the backend that is not written yet"
    assert look_at(failed("a.b", "NotImplementedError: Could not run 'aten::cumsum'")).startswith("an op that torch")
    begun = "CaptureError: the capture could not begin: wrong stream (712)"  # whatever the case is about
    assert look_at(failed("device.memory-counts-graph-pools", begun)).startswith("_begin()")
    assert look_at(FAILURES[2]) == "the case's own guess"
    assert look_at(FAILURES[3]) == "the case's own guess"  # nan was expected
    assert "did not write" in look_at(failed("a.b", "AssertionError: out: nan instead of 3 (at rig.py:40)"))
    assert "another stream than the current one" in look_at(failed("a.b", "OrderError: nothing orders the two"))
    assert look_at(failed("a.b", "did not finish within 60 s")).startswith("a hang")
    assert look_at(failed("a.b", "did not finish within 60 s", cause="")).endswith("stack")


def test_the_summary_shows_each_cause_once() -> None:
    whole = complete_report()
    report = replace(whole, cases=[*FAILURES, *whole.cases])
    terminal = io.StringIO()
    print_report(report, terminal)
    for text in (terminal.getvalue(), as_markdown(report)):
        assert text.count("1 more that saw the same") == 2
        assert "replay.op-equals-eager[bmm]" in text
        assert text.count("failed streams") == 1
        assert text.count("look at") >= 3
    first_lines = [line for line in terminal.getvalue().splitlines() if line.startswith("failed ")]
    assert (
        "failed streams.current-is-per-thread: look at: a method of the backend that is not written yet" in first_lines
    )
    alike = [failed(f"replay.f{chr(97 + i)}", MISSING) for i in range(12)]
    terminal = io.StringIO()
    print_report(Report(report.subject, alike), terminal)
    said = " ".join(terminal.getvalue().split())
    assert (
        "replay.fb, replay.fc, replay.fd, replay.fe and 7 other cases (specgraph conformance acme --group replay)"
        in said
    )
    many = [failed(f"faults.f{chr(97 + i)}", f"ValueError: {chr(97 + i)}") for i in range(SHOWN + 2)]
    terminal = io.StringIO()
    print_report(Report(report.subject, many), terminal)
    assert "and 2 more of 2 other causes" in terminal.getvalue()

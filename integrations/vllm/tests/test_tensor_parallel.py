"""The speculator on two ranks of vLLM's own process group, each with its part of the module and of the KV cache."""

from __future__ import annotations

import pytest
from parallel.processes import results, run_ranks


def test_every_kind_drafts_what_the_whole_module_drafts():
    one, other = results(2, "call", module="rank_tasks", name="draft")
    assert one == other
    assert [(proposes, wrong) for proposes, _, wrong, *_ in one] == [(6, 0)] + [(3, 0)] * 7
    assert all(compared > 0 for _, compared, *_ in one)
    assert [wrong for *_, wrong in one] == [[]] * 8


@pytest.mark.parametrize(("what", "words"), [
    ("support", "rank 1 failed: UnsupportedError: "),
    ("weight", "rank 1 and rank 0 draft from other tokens or weights, or other tokens from the same, at start-up"),
    ("label", "other tokens or weights, or other tokens from the same, at start-up"),
    ("token", "other tokens from the same, at propose"),
])  # fmt: skip
def test_ranks_that_differ_end_with_the_same_error(what, words):
    for found in run_ranks(2, "call", module="rank_tasks", name="drift", what=what):
        assert found["error"] == "RankError"
        assert words in found["message"]


def test_a_rank_that_fails_ends_the_others_too():
    one, other = run_ranks(2, "call", module="rank_tasks", name="drift", what="error")
    assert other == {"error": "ValueError", "message": "of this rank alone"}
    assert one["error"] == "RankError"
    assert "rank 0 waited at" in one["message"]


def test_the_plugin_takes_vllms_process_groups():
    assert results(2, "call", module="rank_tasks", name="wrap") == [
        f"SpecgraphStockSpeculator {rank} of (0, 1): [2.0, 1.0]" for rank in (0, 1)
    ]

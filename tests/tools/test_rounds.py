"""Whole rounds with synthetic acceptance: what is counted must be what was generated."""

from __future__ import annotations

import pytest
import torch
from specgraph_run.tools.floor import DeviceRates
from specgraph_run.tools.propose import BenchCase
from specgraph_run.tools.rounds import bench_rounds

from specgraph.cpu.platform import CpuPlatform
from specgraph.draft import DraftTree


def rows_of(target="tiny-python", acceptance=1.0, rates=None, **changes):
    asked = {"shape": "eagle3-tiny-python", "requests": 2, "k": 2, "context": 20, "lowerings": ("eager", "merged")}
    case = BenchCase(**asked | changes)
    few = {"rounds": 2, "repeats": 1}
    return bench_rounds(CpuPlatform(), case, target, acceptance, dtype=torch.float32, rates=rates, **few)


def test_every_way_generates_the_same_and_full_acceptance_shows():
    rows = rows_of(rates=DeviceRates(1e9, 1e9))
    assert [row["lowering"] for row in rows] == ["eager", "merged", "target alone"]
    for row in rows[:2]:
        assert row["same_tokens"]
        assert row["mean_acceptance_length"] == 3.0
    for row in rows:  # tokens per second = requests x tokens per round over the time of a round
        a_round = 1 if row["lowering"] == "target alone" else 3
        assert row["tokens_per_second"] * row["round_ms"] / 1e3 == pytest.approx(2 * a_round, rel=0.01)
    assert rows[0]["kernel_floor_us"] >= rows[0]["floor_us"] > rows[2]["floor_us"] > 0


def test_trees_accept_by_shares_and_have_no_floor():
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=5)
    rows = rows_of(tree=tree, acceptance=(1.0, 0.0), rates=DeviceRates(1e9, 1e9))
    assert all(row["same_tokens"] for row in rows[:-1])
    assert [row["mean_acceptance_length"] for row in rows[:-1]] == [2.0, 2.0]
    assert ["kernel_floor_us" in row for row in rows] == [False, False, True]

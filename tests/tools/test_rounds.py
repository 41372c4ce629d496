"""Whole rounds with synthetic acceptance: what is counted must be what was generated."""

from __future__ import annotations

import pytest
import torch

from specgraph.device.cpu.platform import CpuPlatform
from specgraph.draft import DraftTree
from specgraph.errors import ConfigError
from specgraph.tools.floor import DeviceRates
from specgraph.tools.rounds import RoundsCase, bench_rounds


def case(**changes) -> RoundsCase:
    asked = {"target": "tiny-python", "shape": "eagle3-tiny-python", "requests": 2, "k": 2, "context": 20}
    return RoundsCase(
        **asked | {"acceptance": 1.0, "lowerings": ("eager", "merged"), "rounds": 2, "repeats": 1} | changes
    )


def test_every_way_generates_the_same_and_full_acceptance_shows():
    rows = bench_rounds(CpuPlatform(), case(), dtype=torch.float32)
    assert [row["lowering"] for row in rows] == ["eager", "merged", "target alone"]
    for row in rows[:2]:
        assert row["same_tokens"]
        assert row["mean_acceptance_length"] == 3.0
    for row in rows:  # tokens per second = requests x tokens per round over the time of a round
        a_round = 1 if row["lowering"] == "target alone" else 3
        assert row["tokens_per_second"] * row["round_ms"] / 1e3 == pytest.approx(2 * a_round, rel=0.01)


def test_rates_give_floors_of_rounds_without_trees():
    rates = DeviceRates(1e9, 1e9)
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=5)
    rows = bench_rounds(CpuPlatform(), case(tree=tree, lowerings=("merged",)), dtype=torch.float32, rates=rates)
    chain, of_trees, alone = rows
    assert "kernel_floor_us" not in of_trees
    assert chain["kernel_floor_us"] >= chain["floor_us"] > alone["floor_us"] > 0


def test_trees_beside_chains_accept_by_shares_of_their_own():
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=5)
    rows = bench_rounds(CpuPlatform(), case(tree=tree, acceptance=0.0, tree_acceptance=(1.0, 0.0)), dtype=torch.float32)
    assert [(row["lowering"], row.get("tree")) for row in rows] == [
        ("eager", None), ("merged", None), ("eager", "2, 2, 5"), ("merged", "2, 2, 5"), ("target alone", None)
    ]  # fmt: skip
    assert all(row["same_tokens"] for row in rows[:-1])
    assert [row["mean_acceptance_length"] for row in rows[:-1]] == [1.0, 1.0, 2.0, 2.0]


def test_an_unknown_target_is_refused():
    with pytest.raises(ConfigError, match="llama3-8b"):
        bench_rounds(CpuPlatform(), case(target="gpt-9"), dtype=torch.float32)

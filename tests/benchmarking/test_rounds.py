"""Whole rounds with synthetic acceptance: what is counted must be what was generated."""

from __future__ import annotations

import pytest
import torch

from specgraph.benchmarking.rounds import RoundsCase, bench_rounds
from specgraph.errors import ConfigError
from specgraph.reference.platform import CpuPlatform


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


def test_an_unknown_target_is_refused():
    with pytest.raises(ConfigError, match="llama3-8b"):
        bench_rounds(CpuPlatform(), case(target="gpt-9"), dtype=torch.float32)

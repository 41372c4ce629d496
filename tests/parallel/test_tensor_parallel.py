"""Models split over two and four processes of the CPU against the same models in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.processes import results
from parallel.tasks import FIXTURES, several

TARGET = str(FIXTURES / "target")
DRAFTERS = ("eagle3-llama", "eagle", "mtp", "dflash", "target")
LOWERINGS = ("eager", "piecewise", "step", "merged", "round")


def run(draft: str = "eagle3-llama", **changes: Any) -> dict[str, Any]:
    return {"target": TARGET, "draft": str(FIXTURES / draft), **changes}


RUNS = [
    *(run(draft) for draft in DRAFTERS),
    *(run(lowering=lowering) for lowering in LOWERINGS if lowering != "merged"),
    run(tree=True),
    run(whole_drafter=True),
    run(temperature=0.8),
    run(logprobs=True),
]


def alone(runs: list[dict[str, Any]]) -> list[Any]:
    with torch.inference_mode():
        return several(None, runs)


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    """Each of RUNS in this process."""
    return alone(RUNS)


@pytest.fixture(scope="module")
def two() -> list[list[Any]]:
    """Each of RUNS on two ranks."""
    return results(2, "several", runs=RUNS)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda n: "-".join(map(str, list(RUNS[n].values())[1:]))[-40:])
def test_two_ranks_give_the_tokens_of_one(whole, two, number):
    """float64, so that the order in which partial sums are added up decides no token."""
    assert two[0][number]["tokens"] == two[1][number]["tokens"] == whole[number]["tokens"]
    assert two[0][number]["accepted"] == whole[number]["accepted"]


def test_lowerings_are_bit_equal_on_every_rank(two):
    of = {each.get("lowering", "merged"): n for n, each in enumerate(RUNS) if each["draft"].endswith("eagle3-llama")
          and not each.keys() - {"target", "draft", "lowering"}}  # fmt: skip
    assert set(of) == set(LOWERINGS)
    for rank in two:
        assert len({rank[n]["kv"] for name, n in of.items() if name != "round"}) == 1
        assert len({str(rank[n]["tokens"]) for n in of.values()}) == 1
    assert two[0][0]["kv"] != two[1][0]["kv"], "each rank has heads of its own"
    assert two[0][0]["launches"] == 1, "the all-reduces are inside the merged graph"


def test_a_rank_holds_half_of_the_matrices(whole, two):
    """All but the norms and the rotary table."""
    for rank in two:
        assert 0.5 < rank[0]["bytes"] / whole[0]["bytes"] < 0.65


def test_four_ranks_share_kv_heads(whole):
    """Two KV heads on four ranks: each head on two of them."""
    runs = [RUNS[0], run(lowering="eager"), run("dflash")]
    four = results(4, "several", runs=runs)
    for number, each in enumerate((whole[0], whole[0], whole[DRAFTERS.index("dflash")])):
        assert all(rank[number]["tokens"] == each["tokens"] for rank in four)
    assert all(rank[0]["kv"] == rank[1]["kv"] for rank in four)

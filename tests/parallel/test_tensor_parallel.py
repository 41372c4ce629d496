"""Models split over two processes of the CPU against the same models in one process; four: test_context_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.processes import results
from parallel.tasks import FIXTURES, several

TARGET = str(FIXTURES / "target")
DRAFTERS = ("eagle3-llama", "eagle", "mtp", "dflash", "peagle")
LOWERINGS = ("eager", "piecewise", "merged")
"""The lowerings that the first of DRAFTERS runs in; the others run in some of them."""


def run(draft: str = "eagle3-llama", **changes: Any) -> dict[str, Any]:
    return {"target": TARGET, "draft": str(FIXTURES / draft), **changes}


RUNS = [
    *(run(draft) for draft in DRAFTERS),
    *(run(decode=lowering) for lowering in LOWERINGS if lowering != "merged"),
    run("target", k_candidates=(1, 3)),
    run("target", tree=True),
    run(whole_drafter=True, temperature=0.8, decode="step"),
    *(run(draft, vocabulary=size, decode="eager") for draft, size in (("mtp", 20), ("eagle3-llama", 33))),
]


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    """Each of RUNS in this process, without graphs: neither lowerings nor the choice of K decide about tokens."""
    eager = [{name: value for name, value in each.items() if name != "k_candidates"} | {"decode": "eager"}
             for each in RUNS]  # fmt: skip
    distinct = [each for n, each in enumerate(eager) if each not in eager[:n]]
    with torch.inference_mode():
        found = several(None, distinct)
    return [found[distinct.index(each)] for each in eager]


@pytest.fixture(scope="module")
def two() -> list[list[Any]]:
    """Each of RUNS on two ranks."""
    return results(2, "several", runs=RUNS)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda n: "-".join(map(str, list(RUNS[n].values())[1:]))[-40:])
def test_two_ranks_give_the_tokens_of_one(whole, two, number):
    """float64, so that the order in which partial sums are added up decides no token; the suite has float32."""
    assert two[0][number]["tokens"] == two[1][number]["tokens"]
    assert two[0][number]["tokens"] == whole[number]["tokens"]
    if "k_candidates" not in RUNS[number]:
        assert two[0][number]["accepted"] == whole[number]["accepted"]


def test_ranks_choose_k_by_the_times_of_the_first(two):
    """Each rank measures its own times; they must not choose by them."""
    of_both = [rank[RUNS.index(run("target", k_candidates=(1, 3)))]["times"] for rank in two]
    assert of_both[0] is not None
    assert of_both[0] == of_both[1]


def test_lowerings_are_bit_equal_on_every_rank(two):
    of = {each.get("decode", "merged"): n for n, each in enumerate(RUNS) if each["draft"].endswith("eagle3-llama")
          and not each.keys() - {"target", "draft", "decode"}}  # fmt: skip
    assert set(of) == set(LOWERINGS)
    for rank in two:
        assert len({rank[n]["kv"] for n in of.values()}) == 1
        assert len({str(rank[n]["tokens"]) for n in of.values()}) == 1
    assert two[0][0]["kv"] != two[1][0]["kv"], "each rank has heads of its own"
    assert two[0][0]["launches"] == 1, "the all-reduces are inside the merged graph"


def test_a_rank_holds_half_of_the_matrices(whole, two):
    """All but the norms and the rotary table."""
    for rank in two:
        assert 0.5 < rank[0]["bytes"] / whole[0]["bytes"] < 0.65

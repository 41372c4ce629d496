"""Mixtures of experts over two and four processes of the CPU, against the same models in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.mixtures import write_mixture
from parallel.processes import results
from parallel.tasks import several
from parallel.unequal_ranks import write_pair

pytest.importorskip("transformers")
LOWERINGS = ("eager", "merged")
LAST = LOWERINGS[-1:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Folders of mixtures by architecture."""
    return {name: write_mixture(name, tmp_path_factory.mktemp(name)) for name in ("Qwen3Moe", "GptOss")}


def runs(folders: dict[str, str]) -> list[dict[str, Any]]:
    """Each mixture drafts for itself, so that experts run in the drafter too, and drafts are accepted."""
    every: list[dict[str, Any]] = []
    for name, experts, lowerings in (
        ("Qwen3Moe", True, LOWERINGS), ("Qwen3Moe", False, LAST), ("GptOss", True, LAST), ("GptOss", False, LAST),
    ):  # fmt: skip
        every += [
            {"target": folders[name], "draft": folders[name], "decode": lowering, "experts": experts}
            for lowering in lowerings
        ]
    return every


@pytest.fixture(scope="module")
def whole(folders) -> dict[str, Any]:
    """Each of the mixtures in this process, without graphs, by folder."""
    with torch.inference_mode():
        found = several(None, [{"target": each, "draft": each, "decode": "eager"} for each in folders.values()])
    return dict(zip(folders.values(), found, strict=True))


def test_two_ranks_give_the_tokens_of_one(folders, whole):
    """float64; whole experts and split ones; lowerings bit-equal on every rank."""
    found = results(2, "several", runs=runs(folders))
    for number, each in enumerate(runs(folders)):
        alone = whole[each["target"]]
        assert all(rank[number]["tokens"] == alone["tokens"] for rank in found), each
        assert found[0][number]["accepted"] == alone["accepted"] > 2
    for rank in found:
        assert len({rank[number]["kv"] for number in range(len(LOWERINGS))}) == 1
        assert rank[1]["launches"] == 1, "the exchanges between experts are inside the merged graph"
    assert found[0][0]["bytes"] < 0.65 * whole[folders["Qwen3Moe"]]["bytes"], "a rank holds its own experts"


@pytest.fixture(scope="module")
def unequal(tmp_path_factory) -> list[Any]:
    """The task of that name in the lowerings eager and merged, by rank."""
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    return results(2, "unequal", pair=pair, rounds=25, lowerings=("eager", "merged"))


def test_data_parallel_ranks_with_unequal_batches(unequal):
    """Each rank has requests of its own, or none for a while; the single process gives the same tokens. They agree on a
    round before its launch."""
    for (eager, merged), _ in unequal:
        assert merged == eager
        assert merged["requests_that_differ"] == 0
        assert merged["rounds_without_requests"] > 2
    first, second = (runs[0] for runs, _ in unequal)
    assert first["rounds"] == second["rounds"] >= 25
    assert first["requests"] + second["requests"] > 4
    assert first["tokens"] + second["tokens"] > 30


def test_a_request_that_fails_to_join_on_one_rank_ends_alone(unequal):
    right = ["length", "", True]
    (_, first), (_, second) = unequal
    assert first == [right] * 4
    assert second == [right, *[["failed", "no room", False]] * 2, right]


def test_four_ranks(folders, whole):
    """Whole experts of the mixture whose experts have biases."""
    found = results(4, "several", runs=[runs(folders)[-2]])
    assert all(rank[0]["tokens"] == whole[folders["GptOss"]]["tokens"] for rank in found)

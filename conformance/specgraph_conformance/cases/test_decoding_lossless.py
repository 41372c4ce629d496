"""Speculative output is the target's own with every drafter, mode and K, and other requests don't change it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from specgraph.device import Platform
from specgraph.draft import DraftTree
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import (
    MANY,
    decoder,
    expect_lossless,
    expect_targets_tokens,
    generate,
    requests,
)
from specgraph_conformance.draft_rig import GRAPH_MODES
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import HEADS


@case(
    "decoding.quick-check",
    "Speculative greedy output is the target's own in the platform's default lowering.",
    cause="run the other decoding cases: each looks at one thing",
    quick=True,
)
def test_quick(platform: Platform, seed: int) -> None:
    expect_lossless(platform, requests(seed, count=3, tokens=12))


@case(
    "decoding.greedy-is-lossless",
    "Speculative greedy output is the target's own, token for token, at the verify pass's shape.",
    cause="a rejected draft that stays in the output or the KV, or a verify graph with old lengths",
)
def test_lossless(platform: Platform, attention: str, seed: int) -> None:
    metrics = expect_lossless(platform, requests(seed, count=12), decode="auto", attention=attention, **MANY)
    assert metrics.mean_acceptance_length > 1.3, "the pair accepts too little for this to say much"


@pytest.mark.parametrize("k", [1, 2, 7])
@case(
    "decoding.lossless-for-every-k",
    "Output is the target's own for every number of draft tokens.",
    hazard="k-equals-2",
    cause="shapes or columns that assume one K",
)
def test_every_k(platform: Platform, k: int, seed: int) -> None:
    expect_lossless(platform, requests(seed, count=3), k=k)


@pytest.mark.parametrize("kind", [*(kind for kind in HEADS if kind != "eagle"), "ngram"])
@case(
    "decoding.lossless-with-every-head",
    "Output is the target's own with every kind of drafter, auxiliary hidden states and own vocabularies included.",
    cause="hidden states handed over from the wrong rows or layers",
)
def test_heads(platform: Platform, kind: str, seed: int) -> None:
    expect_lossless(platform, requests(seed, count=3), decode="auto", kind=kind)


@pytest.mark.parametrize("verified", [0.4, 1.5, 3.0])
@case(
    "decoding.ragged-verify-is-lossless",
    "Where a verify takes the likeliest drafts of all requests, output is the target's own as requests come and go, "
    "and drafts are accepted.",
    hazard="ragged-rows",
    cause="rows of one request that another reads, a draft that has no row and is accepted, or attention over ragged "
    "rows in a graph",
)
def test_ragged(platform: Platform, verified: float, seed: int) -> None:
    asked = requests(seed, count=7, temperatures=(0.0,))
    with decoder(platform, kind="dspark", verified_drafts=verified) as made:
        expect_targets_tokens(made, asked, generate(made, asked))
        assert sum(made.metrics.accepted) > 0, "no draft was accepted"


@pytest.mark.parametrize("way", [*(mode for mode in GRAPH_MODES if mode != "NONE"), "step"])
@case(
    "decoding.graph-modes",
    "In each graph mode and lowering, target and drafter decode what they decode without graphs, accept as many drafts "
    "at each position, and leave the same bits of KV.",
    cause="prompt passes of the target in this mode, a mode that target and drafter don't share, or a graph that works "
    "and drafts other tokens: run the group drafting",
)
def test_modes(platform: Platform, attention: str, way: str, seed: int) -> None:
    ours, kept = _decoded(platform, attention, seed, way)
    eager, before = _decoded(platform, attention, seed, "NONE")
    assert ours == eager
    assert sum(eager[1]) > 0, "no draft was accepted"
    for a, b in zip(kept, before, strict=True):
        expect_equal(a, b, "keys or values of target or drafter")


@lru_cache
def _decoded(platform: Platform, attention: str, seed: int, way: str) -> tuple[Any, list[Tensor]]:
    """Decode, and return the tokens with acceptance counts, and the KV of target and drafter without the null block."""
    asked = requests(seed, count=5)
    with decoder(platform, **GRAPH_MODES.get(way, {"decode": way}), attention=attention) as made:
        seen = generate(made, asked), made.metrics.accepted, made.metrics.rounds
        assert made.drafter is not None
        caches = [*made.target.caches, *made.drafter.caches]
        return seen, [on_host(tensor)[1:] for cache in caches for tensor in cache]


@case(
    "decoding.k-follows-the-batch",
    "With a schedule of K by batch size, output is the target's as requests come and go, and drafts of each K are "
    "accepted.",
    hazard="dynamic-k-negative",
    cause="a verify of the wrong number of rows after the batch, and with it K, changed",
)
def test_schedule(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=4)
    schedule = {1: 4, 2: 2, 3: 0}
    with decoder(platform, draft_schedule=schedule, capture_sizes=(1, 2, 3)) as made:
        expect_targets_tokens(made, asked, generate(made, asked))
        accepted = made.metrics.accepted
        assert accepted[0] >= accepted[1] >= accepted[3] > 0, "drafts of each K must be accepted"


TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"k": 4, "tree": TREE},
}
"""Options of `decoder`."""

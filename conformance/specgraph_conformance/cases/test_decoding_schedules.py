"""Rounds that draft something else each: trees or chains by the size of the batch, K by acceptance."""

from __future__ import annotations

from itertools import cycle

import pytest
from specgraph.device import LOWERINGS, Platform
from specgraph.draft import DraftTree

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_targets_tokens, generate, requests

TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)


@pytest.mark.parametrize("lowering", [*LOWERINGS, "round"])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
@case(
    "decoding.trees-for-small-batches",
    "Greedy output is the target's own where batches of one request draft trees and larger ones chains, also while "
    "rounds of the other kind are unread.",
    hazard="path-kv-not-moved",
    cause="a verify of one kind for drafts of the other, or KV that a round of the one leaves and the other does not",
)
def test_trees_and_chains(platform: Platform, lowering: str, kind: str, seed: int) -> None:
    asked = requests(seed, count=7)
    schedule = {1: "tree", 3: 2}
    with decoder(
        platform, decode=lowering, kind=kind, tree=TREE, draft_schedule=schedule, capture_sizes=(1, 3)
    ) as made:
        expect_targets_tokens(made, asked, generate(made, asked))
        assert set(made.metrics.drafts_by_k) == {2, 4}, "both kinds of drafts must be verified"


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "decoding.k-changes-every-round",
    "Greedy output is the target's own where every propose drafts another K than the one before.",
    hazard="dynamic-k-negative",
    cause="a graph, or lengths from the host, of the K that was drafted before",
)
def test_k_by_acceptance(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    asked, candidates = requests(seed, count=6), (1, 2, 4)
    times = {3: dict.fromkeys(candidates, 1.0)}
    with decoder(platform, decode=lowering, attention=attention, k_candidates=candidates, round_times=times) as made:
        policy = made.rounds.adaptive
        assert policy is not None
        order = cycle((4, 1, 2, 4, 2, 1))
        policy.choose = lambda num_requests: next(order)
        expect_targets_tokens(made, asked, generate(made, asked))
        assert set(made.metrics.drafts_by_k) == set(candidates)

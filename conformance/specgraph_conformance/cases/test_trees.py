"""Draft trees: the bits of eager, and the target's own tokens."""

from __future__ import annotations

import pytest
from specgraph.device import Platform
from specgraph.draft import DraftTree

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_targets_tokens, generate, requests
from specgraph_conformance.draft_comparison import compare
from specgraph_conformance.draft_rig import make_config
from specgraph_conformance.tiny_models import TREES

TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)


@pytest.mark.parametrize(("kind", "lowering"), [*((kind, "auto") for kind in TREES), ("eagle", "step")])
@case(
    "drafting.trees-equal-eager",
    "Trees, carried states and KV of graphs are bit for bit those of eager, as batches shrink and grow.",
    hazard="acceptance-hidden",
    cause="a step that is captured with values of its own level: slots, bits or candidates",
)
def test_equals_eager(platform: Platform, lowering: str, kind: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering, k=4, tree=TREE), "paged", seed, kind)


@pytest.mark.parametrize("kind", TREES)
@case(
    "decoding.trees-give-the-targets-tokens",
    "Greedy output with draft trees is the target's own, over many rounds of accepted paths of every length.",
    hazard="path-kv-not-moved",
    cause="keys and values of an accepted path that stay where they were drawn",
)
def test_lossless(platform: Platform, kind: str, seed: int) -> None:
    asked = requests(seed)
    with decoder(platform, decode="auto", kind=kind, tree=TREE) as made:
        expect_targets_tokens(made, asked, generate(made, asked))
        if kind == "eagle":
            assert made.metrics.accepted[1] > 0, "paths of two nodes must be accepted"

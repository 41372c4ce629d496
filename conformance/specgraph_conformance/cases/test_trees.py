"""Draft trees end to end: the drawn tree, its KV, every lowering, and the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.draft.protocol import DraftHead

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_targets_tokens, generate, requests
from specgraph_conformance.draft_comparison import away_from_the_end, compare, float64_head, rig
from specgraph_conformance.draft_oracles import one_pass_logits
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.oracles import gather_request
from specgraph_conformance.rig import on_host
from specgraph_conformance.tiny_models import KINDS, TREES, Head
from specgraph_conformance.tree_oracles import DenseTree, PathLogits, block_tree, dense_tree, paths_of

TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)
MARGIN = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.2}
"""The distance between scores above which only one tree is right, by the model's dtype."""


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "draft-model"])
@case(
    "drafting.tree-of-a-search",
    "The tree that is drawn is the one that a float64 search over the whole vocabulary finds, path by path.",
    hazard="sibling-sees-sibling",
    cause="rows of a step that see other branches, a wrong parent's hidden state, or a score without its path",
)
def test_search(platform: Platform, kind: str, seed: int) -> None:
    def search(oracle: Head, *given: Any) -> DenseTree:
        return dense_tree(PathLogits(cast(DraftHead, oracle), *given), TREE)

    _expect_searched(platform, kind, seed, search)


@pytest.mark.parametrize("kind", [kind for kind in TREES if KINDS[kind].is_one_pass])
@case(
    "drafting.parallel-tree-of-a-search",
    "A drafter that drafts all positions in one pass draws the tree that a float64 search over all paths finds.",
    hazard="parallel-block-rows",
    cause="draft_block_tree: logits of another position or request, or paths that are left out too early",
)
def test_parallel_search(platform: Platform, kind: str, seed: int) -> None:
    def search(oracle: Head, *given: Any) -> DenseTree:
        return block_tree(one_pass_logits(oracle, *given, num_drafts=TREE.num_steps), oracle.draft_to_target, TREE)

    _expect_searched(platform, kind, seed, search)


def _expect_searched(platform: Platform, kind: str, seed: int, search: Callable[..., DenseTree]) -> None:
    """Compare the trees of some proposes with the trees that a search finds.

    Args:
        search: takes the head in float64 and, for one request, the accepted tokens, their hidden states, the first
            one's position, and the keys and values before it.
    """
    made = rig(platform, make_config(decode="auto", k=4, tree=TREE), "paged", kind)
    oracle, compared = float64_head(made, kind), 0
    for batch in make_batches(made.config, made.head.aux_size, seed, [3, 4, 1]):
        batch = away_from_the_end(made.config, batch)
        before = [(on_host(cache.key), on_host(cache.value)) for cache in made.caches]
        drafts = made.propose(batch)
        assert drafts.parents is not None
        tokens, parents = on_host(drafts.token_ids).tolist(), on_host(drafts.parents).tolist()
        q, offset = made.config.query_len, made.drafter.position_offset
        for r in range(batch.num_requests):
            start, count = batch.start_positions[r] + offset, batch.num_sampled[r]
            keys, values = ([gather_request(cache[i], batch.blocks[r], start) for cache in before] for i in (0, 1))
            aux = batch.aux_hidden[r * q : r * q + count].to(made.head.dtype)
            wanted = search(oracle, batch.sampled_token_ids[r, :count], aux, start, keys, values)
            if wanted.margin > MARGIN[made.head.dtype]:
                assert set(paths_of(tokens[r], parents[r])) == wanted.paths, f"the tree of request {r}"
                compared += 1
    assert compared > 0, "every tree had scores as good as tied"


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

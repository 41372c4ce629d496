"""Draft trees end to end: the drawn tree, its KV, every lowering, and the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.draft.protocol import DraftHead

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_decoding_first_propose import float64_pair, reads_hidden_states
from specgraph_conformance.decode_rig import decoder, expect_targets_logprobs, expect_targets_tokens, generate, requests
from specgraph_conformance.dense_models import short_of_best
from specgraph_conformance.draft_comparison import away_from_the_end, compare, float64_head, rig
from specgraph_conformance.draft_oracles import one_pass_logits
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.oracles import gather_request
from specgraph_conformance.rig import expect_equal, on_host
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


@case(
    "drafting.trees-see-no-stale-nodes",
    "What earlier rounds left in the slots of a tree's nodes changes no draft.",
    hazard="rejected-node-kv-left-visible",
    cause="bits of levels that are not drawn yet, or a context that ends behind the accepted tokens",
)
def test_stale(platform: Platform, seed: int) -> None:
    seen = []
    for junk in (1.0, -30.0):
        made = rig(platform, make_config(decode="auto", k=4, tree=TREE), "paged", "eagle")
        (batch,) = make_batches(made.config, made.head.aux_size, seed, [3])
        batch = away_from_the_end(made.config, replace(batch, num_sampled=[made.config.query_len] * 3))
        for start, blocks in zip(batch.start_positions, batch.blocks, strict=True):
            for place in range(start, len(blocks) * made.config.block_size):
                block, offset = blocks[place // made.config.block_size], place % made.config.block_size
                for cache in made.caches:
                    cache.key[block, offset] = junk
                    cache.value[block, offset] = junk
        drafts = made.propose(batch)
        assert drafts.parents is not None
        seen.append(
            (on_host(drafts.token_ids), on_host(drafts.parents), on_host(made.drafter.read_set()["tree.hidden"]))
        )
        made.close()
    for first, second, what in zip(*seen, ("tokens", "parents", "hidden states"), strict=True):
        expect_equal(first, second, what)


@case(
    "drafting.trees-stay-in-their-blocks",
    "Nodes of a tree are written to blocks of their own request only, also across the end of a block.",
    hazard="tree-slot-overlaps-next-request",
    cause="slots counted on from the last one in memory, or too few KV slots reserved behind a request",
)
def test_blocks(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", k=4, tree=TREE, max_num_requests=2), "paged", "eagle")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [1])
    block = made.config.block_size
    batch = replace(batch, start_positions=[2 * block - made.config.query_len - 2], blocks=[[5, 1, 3, 7]])
    before = made.host_caches()
    made.propose_to_host(batch)
    for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
        for other in (2, 4, 6, 8):
            expect_equal(key[other - 1], old_key[other - 1], f"keys of block {other}, which is another request's")
            expect_equal(value[other - 1], old_value[other - 1], f"values of block {other}")
        assert not torch.equal(key[2, : block // 2], old_key[2, : block // 2]), "no node behind the end of a block"


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


@case(
    "decoding.trees-up-to-max-model-len",
    "With draft trees, tokens and their log-probabilities are the target's own up to max_model_len, also where that is "
    "the end of a KV block.",
    hazard="tree-without-room",
    cause="no KV block for the nodes of a tree that reaches past max_model_len: their keys are lost",
)
def test_end(platform: Platform, seed: int) -> None:
    asked = [replace(request, max_tokens=50) for request in requests(seed, count=6)]
    with decoder(platform, kind="target", k=4, tree=TREE, max_model_len=48, logprobs=True) as made:
        results = made.generate(asked)
        expect_targets_tokens(made, asked, [result.token_ids for result in results])
        expect_targets_logprobs(made, asked, results)
    assert {
        len(request.prompt_token_ids) + len(result.token_ids) for request, result in zip(asked, results, strict=True)
    } == {48}


@case(
    "decoding.trees-after-a-path",
    "After each round, the best first node of a request's next tree is the token that a float64 drafter drafts from "
    "the hidden states of the accepted path.",
    hazard="path-hidden-not-taken",
    cause="after a tree's verify the drafter is given the hidden states of other nodes than those of the path",
)
def test_after_path(platform: Platform, seed: int) -> None:
    target, head = float64_pair()
    reads_hidden_states(head)
    accepted = 0
    with decoder(platform, decode="piecewise", k=4, tree=TREE, rounds_ahead=0) as made:
        assert made.drafter is not None
        reads_hidden_states(made.drafter.head)
        for request in requests(seed, count=3):
            made.add(request)
        while made.num_unfinished:
            # A round begins with its propose, so its tree follows the tokens known before the round.
            before = {state.index: list(state.token_ids) for state in made.rounds.running}
            accepted += sum(chunk.num_accepted for chunk in made.step())
            first = on_host(made.drafter.buffers.draft_token_ids)[:, 0].tolist()
            for state in made.rounds.running:
                if (known := before.get(state.index)) is None:
                    continue  # it joined after the round began
                (short,) = short_of_best(target, head, known[:-1], [first[state.row]])
                assert short < 0.02, f"after {len(known)} tokens the first node is {short:.2f} short of the best"
    assert accepted > 0, "no path was accepted"


@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
@case(
    "decoding.trees-for-small-batches",
    "Greedy output is the target's own where batches of one request draft trees and larger ones chains, also while "
    "rounds of the other kind are unread.",
    hazard="path-kv-not-moved",
    cause="a verify of one kind for drafts of the other, or KV that a round of the one leaves and the other does not",
)
def test_trees_and_chains(platform: Platform, kind: str, seed: int) -> None:
    asked = requests(seed, count=7)
    schedule = {1: "tree", 3: 2}
    with decoder(platform, kind=kind, tree=TREE, draft_schedule=schedule, capture_sizes=(1, 3)) as made:
        expect_targets_tokens(made, asked, generate(made, asked))
        assert set(made.metrics.drafts_by_k) == {2, 4}, "both kinds of drafts must be verified"

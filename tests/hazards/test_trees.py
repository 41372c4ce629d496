"""Draft trees: slots of their nodes, and the propose after an accepted path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hazards.dense_models import float64_pair, reads_hidden_states, short_of_best
from specgraph_conformance.decode_rig import decoder, expect_targets_logprobs, expect_targets_tokens, requests
from specgraph_conformance.draft_comparison import away_from_the_end, rig
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import expect_equal, on_host

from specgraph.device import Platform
from specgraph.draft import DraftTree

TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)


@pytest.mark.hazard("rejected-node-kv-left-visible")
def test_trees_see_no_stale_nodes(platform: Platform, seed: int) -> None:
    """Values of earlier rounds in the slots of a tree's nodes change no draft."""
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


@pytest.mark.hazard("tree-slot-overlaps-next-request")
def test_trees_stay_in_their_blocks(platform: Platform, seed: int) -> None:
    """Nodes of a tree are written to blocks of their own request only, also across the end of a block."""
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


@pytest.mark.hazard("tree-without-room")
def test_trees_up_to_max_model_len(platform: Platform, seed: int) -> None:
    """With draft trees, tokens and their log-probabilities are the target's own up to max_model_len, also where that is
    the end of a KV block."""
    asked = [replace(request, max_tokens=50) for request in requests(seed, count=6)]
    with decoder(platform, kind="target", k=4, tree=TREE, max_model_len=48, logprobs=True) as made:
        results = made.generate(asked)
        expect_targets_tokens(made, asked, [result.token_ids for result in results])
        expect_targets_logprobs(made, asked, results)
    assert {
        len(request.prompt_token_ids) + len(result.token_ids) for request, result in zip(asked, results, strict=True)
    } == {48}


@pytest.mark.hazard("path-hidden-not-taken")
def test_trees_after_a_path(platform: Platform, seed: int) -> None:
    """After each round, the best first node of a request's next tree is the token that a float64 drafter drafts from
    the hidden states of the accepted path."""
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

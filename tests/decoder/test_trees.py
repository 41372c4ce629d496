"""Draft trees, alone and in turns with chains, give the target's own tokens in every lowering, whatever their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target, vocabulary
from random_prompts import prompt
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_run.decoder import Request
from torch import Tensor
from torch.nn import functional

from specgraph.attention import Attend
from specgraph.draft import DraftTree
from specgraph.errors import ConfigError, UnsupportedError

TREE = DraftTree(num_steps=3, top_k=3, num_draft_tokens=9)
STEPS = 4
"""The depth of the parallel drafter's trees."""


def tree(steps: int, top_k: int, tokens: int) -> dict:
    return {"num_speculative_tokens": steps, "tree": DraftTree(num_steps=steps, top_k=top_k, num_draft_tokens=tokens)}


def mixed(schedule: dict) -> dict:
    chains = [k for k in schedule.values() if k != "tree"]
    return {"draft_schedule": schedule, "tree": TREE, "num_speculative_tokens": max([TREE.num_steps, *chains])}


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_a_tree_of_top_k_1_is_a_chain(make_decoder, requests, shadow):
    chain = make_decoder(shadow, num_speculative_tokens=4)
    as_tree = make_decoder(shadow, **tree(4, 1, 5))
    assert tokens(as_tree.generate(requests)) == tokens(chain.generate(requests))
    assert as_tree.metrics == chain.metrics


def test_a_tree_accepts_more_than_the_chain_in_it(make_decoder, requests, shadow):
    lengths = []
    for shape in ((3, 1, 4), (3, 2, 7), (3, 4, 16)):
        decoder = make_decoder(shadow, **tree(*shape))
        decoder.generate(requests)
        lengths.append(decoder.metrics.mean_acceptance_length)
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("block_size", [4, 64])
def test_requests_that_reach_max_model_len(make_decoder, shadow, block_size):
    """Nodes of a permitted depth lie behind max_model_len, in slots of their own."""
    asked = [Request(prompt_token_ids=prompt(n, seed=n), max_tokens=100) for n in (50, 60, 63, 30)]
    wanted = tokens(make_decoder(None, block_size=block_size).generate(asked))
    decoder = make_decoder(shadow, block_size=block_size, decode="merged", **tree(4, 4, 24))
    assert tokens(decoder.generate(asked)) == wanted
    assert [len(got) for got in wanted] == [14, 4, 1, 34]
    for cache in (*decoder.target.caches, *decoder.drafter.caches):
        assert not cache.key[0].any()  # the null block


def test_prefill_passes_shorter_than_the_nodes_of_a_tree(make_decoder, shadow):
    """A request that may reach max_model_len has more KV blocks, for nodes, than those of a prefill pass's rows."""
    settings = {"prefill_sizes": [1], "block_size": 1, "max_num_requests": 1}
    requests = [Request(prompt_token_ids=prompt(9), max_tokens=60)]
    wanted = tokens(make_decoder(None, **settings).generate(requests))
    assert tokens(make_decoder(shadow, **settings, **tree(3, 2, 6)).generate(requests)) == wanted


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0, 4, 4), "num_steps must be at least 1"),
        ((3, 0, 4), "top_k must be at least 1"),
        ((5, 4, 5), "it is 6"),
        ((2, 2, 8), r"3 .one path. to 7"),
        ((9, 9, 60), "72"),
        ((5, 8, 65), "64 rows"),
    ],
)
def test_shapes_that_are_no_tree_are_refused(shape, words):
    with pytest.raises(ConfigError, match=words):
        tree(*shape)


def test_what_has_no_trees_says_why(make_decoder, eagle3):
    with pytest.raises(UnsupportedError, match=r"paged-host.*no ancestor mask"):
        make_decoder(eagle3, attention="host", **tree(3, 2, 5))
    with pytest.raises(ConfigError, match="draft_schedule"):
        make_decoder(eagle3, draft_schedule={4: 3}, **tree(3, 2, 5))
    with pytest.raises(ConfigError, match="4, and the draft tree has 3 steps"):
        make_decoder(eagle3, **tree(3, 2, 5) | {"num_speculative_tokens": 4})


@pytest.mark.parametrize("settings", [tree(3, 3, 12), mixed({2: "tree", 4: 0})], ids=["trees", "trees or nothing"])
def test_a_seed_gives_the_tokens_that_it_gives_the_target_alone(make_decoder, requests, shadow, settings):
    """The target's own draw decides at every node, with the noise of its position, whatever was drafted."""
    asked = [replace(one, temperature=(0.5, 0.0, 1.1)[i % 3], seed=7 * i) for i, one in enumerate(requests)]
    wanted = tokens(make_decoder(None, sampled=True).generate(asked))
    decoder = make_decoder(shadow, sampled=True, decode="merged", **settings)
    assert tokens(decoder.generate(asked)) == wanted
    assert decoder.metrics.accepted[0] > 0


@pytest.mark.parametrize(
    ("schedule", "lowering"),
    [({2: "tree", 4: 5}, "merged"), ({1: 4, 4: "tree"}, "eager"), ({1: "tree", 2: 3, 4: 0}, "eager")],
    ids=str,
)
def test_trees_and_chains_in_turns(make_decoder, requests, shadow, target_alone, schedule, lowering):
    decoder = make_decoder(shadow, decode=lowering, check_inputs=True, **mixed(schedule))
    assert tokens(decoder.generate(requests)) == target_alone(requests)
    assert decoder.drafter.launches["propose"] == (decoder.drafter.num_proposes if lowering == "merged" else 0)
    assert decoder.metrics.accepted[1] > 0


def test_drafts_are_those_of_a_decoder_that_drafts_one_kind(make_decoder, shadow):
    """A request that was drafted for in trees has the drafter KV that chains would have left, and the other way round:
    the drafts that follow are accepted alike."""
    long = Request(prompt_token_ids=prompt(9, seed=9), max_tokens=40)
    short = [Request(prompt_token_ids=prompt(5 + i, seed=i), max_tokens=6) for i in range(3)]

    def caches(decoder):
        ids = [decoder.add(request) for request in (long, *short)]
        blocks = None
        for _ in range(12):
            decoder.step()
            running = {state.index: state for state in decoder.rounds.running}
            if ids[0] in running:
                state = running[ids[0]]
                blocks, length = list(state.blocks), state.position
        size = decoder.config.block_size
        slots = [blocks[p // size] * size + p % size for p in range(length - decoder.config.query_len)]
        return [cache.key.flatten(0, 1)[slots].clone() for cache in decoder.drafter.caches]

    switched, chains = (
        caches(make_decoder(shadow, **settings))
        for settings in (mixed({2: "tree", 4: 3}), {"num_speculative_tokens": 3})
    )
    for one, other in zip(switched, chains, strict=True):
        rows = min(one.shape[0], other.shape[0])
        assert rows > 9
        assert (one[:rows] - other[:rows]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_schedule": {4: 2}}, "names no 'tree'.*4:tree,16:3"),
        ({"tree": None}, "has 'tree', and the shape of the tree is missing"),
        ({"num_speculative_tokens": 2}, "2, and the draft tree has 3 steps"),
        ({"draft_schedule": {2: "tree"}}, "ends at 2 requests"),
        ({"draft_schedule": {2: "tree", 4: 9}}, "K is 0 to num_speculative_tokens = 3"),
    ],
)
def test_schedules_that_are_refused(make_decoder, shadow, changes, words):
    with pytest.raises(ConfigError, match=words):
        make_decoder(shadow, **mixed({2: "tree", 4: 2}) | changes)


class Successors(DFlashHead):
    """Drafts each token as the successor of the one before, as the target mostly does, disturbed by what it attends
    to."""

    def __init__(self, block: BlockParts) -> None:
        super().__init__(block)
        self.successor = (self.tensors.embed_tokens @ vocabulary(torch.float32)[1].T).argmax(-1)

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        hidden = super().forward(token_ids, attend)
        disturbed = functional.rms_norm(hidden, hidden.shape[-1:], self.tensors.norm, self.sizes.rms_norm_eps)
        drafted = [token_ids.view(-1, 1 + STEPS)[:, 0]]
        for _ in range(STEPS - 1):
            drafted.append(self.successor[drafted[-1]])
        known = self.tensors.embed_tokens[torch.stack([drafted[0], *drafted], 1).flatten()]
        return known + disturbed

    projection = None  # pyright: ignore  (its logits are no product of the hidden state)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.tensors.lm_head)

    def weights(self) -> Mapping[str, Tensor]:
        return {**super().weights(), "successor": self.successor}


def successors() -> Successors:
    head = make_head("dflash", make_target())
    weights = replace(head.tensors, lm_head=vocabulary(torch.float32)[1])
    return Successors(BlockParts(head.sizes, weights, head.layers, head.aux_layers, 9, VOCAB - 1))


def test_trees_of_a_parallel_drafter(make_decoder, requests):
    model, settings = make_target(), tree(STEPS, 4, 14)
    asked = [replace(one, prompt_token_ids=[t % VOCAB for t in one.prompt_token_ids]) for one in requests]
    wanted = tokens(make_decoder(None, target=model, query_len=STEPS + 1).generate(asked))
    decoder = make_decoder(successors(), target=model, decode="merged", check_inputs=True, **settings)
    assert tokens(decoder.generate(asked)) == wanted
    chain = make_decoder(successors(), target=model, num_speculative_tokens=STEPS)
    assert tokens(chain.generate(asked)) == wanted
    assert decoder.metrics.mean_acceptance_length > chain.metrics.mean_acceptance_length > 1.5
    assert all(decoder.metrics.accepted)
    assert decoder.drafter.launches["propose"] == decoder.drafter.num_proposes


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_a_parallel_drafter_s_tree_of_top_k_1_is_its_chain(make_decoder, requests, kind):
    model = make_target()
    head = successors() if kind == "dflash" else make_head(kind, model)
    asked = [replace(one, prompt_token_ids=[t % VOCAB for t in one.prompt_token_ids]) for one in requests]
    chain = make_decoder(head, target=model, num_speculative_tokens=STEPS)
    as_tree = make_decoder(head, target=model, **tree(STEPS, 1, STEPS + 1))
    assert tokens(as_tree.generate(asked)) == tokens(chain.generate(asked))
    assert as_tree.metrics == chain.metrics


@pytest.mark.parametrize("sampled", [False, True], ids=["scheduled", "sampled"])
def test_a_parallel_drafter_s_trees(make_decoder, requests, sampled):
    """They serve small batches beside chains, and requests that sample, whose own draws decide at every node."""
    model = make_target()
    asked = [
        replace(one, prompt_token_ids=[t % VOCAB for t in one.prompt_token_ids], temperature=sampled * 0.4 * (i % 3))
        for i, one in enumerate(requests)
    ]
    settings = tree(STEPS, 3, 12) | ({"sampled": True} if sampled else {"draft_schedule": {2: "tree", 4: STEPS}})
    wanted = tokens(make_decoder(None, target=model, sampled=sampled).generate(asked))
    decoder = make_decoder(successors(), target=model, decode="merged", **settings)
    assert tokens(decoder.generate(asked)) == wanted
    assert decoder.metrics.accepted[2] > 0

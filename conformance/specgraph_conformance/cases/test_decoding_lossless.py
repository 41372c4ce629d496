"""Speculative output is the target's own with every drafter, mode and K, and other requests don't change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph_run.decoder import Request, SpeculativeDecoder
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_decoding_first_propose import float64_pair, reads_hidden_states
from specgraph_conformance.decode_rig import (
    MANY,
    MODEL_SEED,
    decoder,
    expect_lossless,
    expect_targets_tokens,
    generate,
    requests,
)
from specgraph_conformance.dense_models import short_of_best
from specgraph_conformance.draft_comparison import TOLERANCE
from specgraph_conformance.draft_rig import GRAPH_MODES
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import HEADS, VOCAB, make_head


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


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dspark"])
@case(
    "decoding.cut-vocabulary",
    "A drafter that is cut to a list of tokens, in any order, has the whole one's logits of these tokens, and their "
    "ids; output is the target's own, with tokens that the list has not.",
    hazard="draft-vocabulary-map",
    cause="rows of other tokens than the map says, a map that forgets the drafter's own, or a sampled token that the "
    "drafter lacks and that is not handed over",
)
def test_cut_vocabulary(platform: Platform, kind: str, seed: int) -> None:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[: VOCAB // 3]
    asked = requests(seed, count=3)
    with decoder(platform, decode="auto", kind=kind, vocabulary=ids) as made:
        tokens = generate(made, asked)
        assert made.drafter is not None
        cut: Any = made.drafter.head
    expect_targets_tokens(made, asked, tokens)
    assert {token for each in tokens for token in each} - set(ids.tolist()), "each token is one of the list"
    whole: Any = make_head(kind, MODEL_SEED, platform.device, cut.dtype, head_dim=cut.attention_layers[0].head_dim)
    own = torch.arange(whole.draft_vocab_size)
    own += 0 if whole.draft_to_target is None else on_host(whole.draft_to_target)
    kept = torch.isin(own, ids).nonzero()[:, 0]
    expect_equal(torch.arange(len(kept)) + on_host(cut.draft_to_target), own[kept], "the target's ids of draft tokens")
    hidden = torch.randn(2, 3, whole.hidden_size, generator=torch.Generator().manual_seed(seed))
    hidden, before = hidden.to(platform.device, whole.dtype), torch.tensor([5, 9], device=platform.device)
    ours, wanted = (
        each.in_order(hidden)(0, before).tensor() if kind == "dspark" else each.logits(hidden[0])
        for each in (cut, whole)
    )
    torch.testing.assert_close(on_host(ours), on_host(wanted)[:, kept], atol=TOLERANCE[whole.dtype], rtol=0)


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
Rounds = list[tuple[list[int], int]]
"""One request's rounds: the tokens of each, and the number of them that were drafts."""


@pytest.mark.parametrize("way", WAYS)
@case(
    "decoding.company-changes-no-round",
    "Each request samples and accepts the same tokens in the same rounds alone and in a batch whose rows move as "
    "others come and go, with a temperature, a seed and parameters of its own.",
    hazard="round-rows-compacted",
    cause="drafts, distributions, parents, seeds or parameters that stay behind when a request changes its row",
    timeout=180,
)
def test_company(platform: Platform, way: str, seed: int) -> None:
    asked = [
        replace(
            request,
            max_tokens=4 + 5 * (i * 3 % 4),
            temperature=(0.0, 0.7, 1.2)[i % 3],
            seed=(1 << 40) + 17 * i,
            top_k=(0, 5)[i % 2],
            frequency_penalty=(0.0, 0.6, 1.2)[i % 3],
            logit_bias={i: 1.5, **dict.fromkeys(range(i % 3), 0.5)},
            stop_token_ids=[i, 60 - i, 30 + i][: i % 4],
        )
        for i, request in enumerate(requests(seed, count=7))
    ]
    # Rows move if the batch then fits a smaller captured size.
    sizes: dict[str, Any] = {"max_num_requests": 4, "capture_sizes": (1, 2, 4)}
    with decoder(platform, sampled=True, sampling_parameters=True, **sizes, **WAYS[way]) as made:
        alone = [_rounds(made, [request])[0] for request in asked]
        together = _rounds(made, asked)
    for i, (mine, ours) in enumerate(zip(alone, together, strict=True)):
        assert ours == mine, f"request {i} in company: {ours}, alone: {mine}"
    assert sum(accepted for rounds in alone for _, accepted in rounds), "no draft was accepted"


@case(
    "decoding.round-rows-compacted",
    "Where requests leave and others move to lower rows, those draft what a float64 drafter drafts from their own "
    "hidden states, and requests that come later end at their own stop tokens only.",
    hazard="round-rows-compacted",
    cause="hidden states that stay behind when rows are compacted, or stop tokens that a row keeps of its last request",
    timeout=120,
)
def test_compacted(platform: Platform, seed: int) -> None:
    limits = [3, 12, 3, 12, 20, 20]
    asked = [replace(each, max_tokens=n) for each, n in zip(requests(seed, count=6), limits, strict=True)]
    with decoder(platform, rounds_ahead=0, max_num_requests=4, capture_sizes=(2, 4)) as made:
        assert made.drafter is not None
        reads_hidden_states(made.drafter.head)
        expected = generate(made, asked)
        expect_targets_tokens(made, asked, expected)
        # Rows 1 and 3 move to 0 and 1. They have as stop tokens only tokens that the requests after them sample.
        early = {token for tokens in expected[:4] for token in tokens}
        own = [list(dict.fromkeys(token for token in tokens[:-1] if token not in early))[:8] for tokens in expected[4:]]
        assert all(own), "the requests sample the same tokens: choose another seed"
        stops = [*own[0], *own[1]]
        first = [replace(each, stop_token_ids=stops if i % 2 else ()) for i, each in enumerate(asked[:4])]
        assert _checked(made, first) == expected[:4]
        assert _checked(made, asked[4:]) == expected[4:], "requests that joined after the others had left"


def _rounds(made: SpeculativeDecoder, asked: Sequence[Request]) -> list[Rounds]:
    """Return the rounds of each request."""
    rounds: list[Rounds] = [[] for _ in asked]
    for chunk in made.stream(asked):
        rounds[chunk.request].append((chunk.token_ids, chunk.num_accepted))
    return rounds


def _checked(made: SpeculativeDecoder, asked: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of each request. Each propose is checked against the float64 drafter."""
    assert made.drafter is not None
    target, head = float64_pair()
    reads_hidden_states(head)
    ids = [made.add(request) for request in asked]
    tokens: dict[int, list[int]] = {each: [] for each in ids}
    while made.num_unfinished:
        before = [(state, list(state.token_ids)) for state in made.rounds.running]
        chunks = made.step()
        drafts = on_host(made.drafter.buffers.draft_token_ids).tolist()
        for state, known in before:
            # `short_of_best` takes the last token from the target, which is greedy.
            short = short_of_best(target, head, known[:-1], drafts[state.row])
            assert max(short) < 0.02, (
                f"request {state.index} drafted {drafts[state.row]} in row {state.row} after {len(known)} tokens; in "
                f"float64 their logits are {[round(value, 2) for value in short]} lower than the best"
            )
        for chunk in chunks:
            tokens[chunk.request] += chunk.token_ids
    return [tokens[each] for each in ids]

"""A request gets the same rounds alone and in company, whatever rows it is moved to meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.engine import Request, SpeculativeDecoder

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_decoding_first_propose import float64_pair, reads_hidden_states
from specgraph_conformance.decode_rig import decoder, expect_targets_tokens, generate, requests
from specgraph_conformance.dense_models import short_of_best
from specgraph_conformance.rig import on_host

TREE = DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "round-tree": {"decode": "round", "k": 4, "tree": TREE},
}
"""Options of `decoder`."""
Rounds = list[tuple[list[int], int]]
"""The tokens of each round of one request, and how many of them were drafts."""


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
    # Rows move where a smaller size then holds the batch.
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
    with decoder(platform, decode="round", rounds_ahead=0, max_num_requests=4, capture_sizes=(2, 4)) as made:
        assert made.drafter is not None
        reads_hidden_states(made.drafter.head)
        expected = generate(made, asked)
        expect_targets_tokens(made, asked, expected)
        # Rows 1 and 3 move to 0 and 1. Their stop tokens are tokens that only the requests after them sample.
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
    """The tokens of each request; each propose of a request is checked against the float64 drafter."""
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

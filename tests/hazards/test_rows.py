"""Rows that move as requests come and go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from specgraph_conformance.decode_rig import (
    decoder,
    generate,
    requests,
)
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph.device import Platform
from specgraph.draft import DraftTree

Rounds = list[tuple[list[int], int]]
"""One request's rounds: the tokens of each, and the number of them that were drafts."""


@pytest.mark.parametrize("options", [{}, {"k": 4, "tree": DraftTree(num_steps=4, top_k=3, num_draft_tokens=12)}])
@pytest.mark.hazard("round-rows-compacted")
def test_company_changes_no_round(platform: Platform, options: dict[str, Any], seed: int) -> None:
    """Each request samples and accepts the same tokens in the same rounds alone and in a batch whose rows move as
    others come and go, with a temperature, a seed and parameters of its own."""
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
    with decoder(platform, sampled=True, sampling_parameters=True, **sizes, **options) as made:
        alone = [_rounds(made, [request])[0] for request in asked]
        together = _rounds(made, asked)
    for i, (mine, ours) in enumerate(zip(alone, together, strict=True)):
        assert ours == mine, f"request {i} in company: {ours}, alone: {mine}"
    assert sum(accepted for rounds in alone for _, accepted in rounds), "no draft was accepted"


def _rounds(made: SpeculativeDecoder, asked: Sequence[Request]) -> list[Rounds]:
    """Return the rounds of each request."""
    rounds: list[Rounds] = [[] for _ in asked]
    for chunk in made.stream(asked):
        rounds[chunk.request].append((chunk.token_ids, chunk.num_accepted))
    return rounds


@pytest.mark.hazard("round-row-reused")
def test_round_rows_change_hands(platform: Platform, seed: int) -> None:
    """A request that takes the row of a cancelled one, while a round of it is unread, gets its own tokens."""
    asked = requests(seed, count=6, tokens=12)
    with decoder(platform) as made:
        alone = [generate(made, [request])[0] for request in asked]
        for steps in (1, 2, 3):
            ids = {made.add(request): i for i, request in enumerate(asked[:3])}
            tokens = defaultdict[int, list[int]](list)
            chunks = [chunk for _ in range(steps) for chunk in made.step()]
            victim = next(iter(ids))
            assert made.cancel(victim)
            ids |= {made.add(request): i for i, request in enumerate(asked[3:], start=3)}
            while made.num_unfinished:
                chunks += made.step()
            for chunk in chunks:
                tokens[chunk.request] += chunk.token_ids
            for request_id, i in ids.items():
                if request_id != victim:
                    assert tokens[request_id] == alone[i], f"request {i} got other tokens than alone"

"""Rounds in flight: the host reads the tokens of a round while the next one runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import Any

from specgraph.device import Platform
from specgraph_run.decoder import SpeculativeDecoder
from specgraph_run.decoder.adaptive_k import AcceptanceRates

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_targets_tokens, generate, requests


@case(
    "decoding.k-changes-every-round",
    "Greedy output is the target's own where every propose drafts another K than the one before, also while rounds of "
    "other K are unread; acceptance is followed by each round's own K.",
    hazard="round-k-changed-in-flight",
    cause="a graph, counts, lengths from the host or rows per request of the K before or after",
)
def test_k_by_acceptance(platform: Platform, attention: str, seed: int) -> None:
    asked, candidates = requests(seed, count=6), (1, 2, 4)
    times = {size: dict.fromkeys(candidates, 1.0) for size in (1, 3)}
    given: dict[str, Any] = {"k_candidates": candidates, "round_times": times, "capture_sizes": (1, 3)}
    with decoder(platform, attention=attention, **given) as made:
        policy, order = made.rounds.adaptive, (4, 1, 2, 4, 2, 1)
        assert policy is not None
        turns = cycle(order)
        policy.choose = lambda num_requests: next(turns)
        first = made.add(asked[0])
        seen = AcceptanceRates(candidates[-1])
        _, *rounds = [chunk for _ in range(5) for chunk in made.step()]
        assert made.metrics.drafts_by_k == Counter(order[: len(rounds)])
        for k, chunk in zip(order, rounds, strict=False):
            seen.observe(k, [len(chunk.token_ids) - 1])
        counted, expected = ([each.tokens(k) for k in candidates] for each in (policy.acceptance, seen))
        assert counted == expected, "acceptance was counted for another K than the round's"
        made.cancel(first)
        made.step()
        results = generate(made, asked)
        assert set(made.metrics.drafts_by_k) == set(candidates), f"K was {set(made.metrics.drafts_by_k)}"
        expect_targets_tokens(made, asked, results)


@case(
    "decoding.round-arrivals",
    "Requests that come, end and are cancelled while rounds are in flight get the target's tokens, each its own.",
    hazard="round-copy-overwritten",
    cause="tokens of a round, or a request's first token, overwritten or taken from another row before they are read",
)
def test_arrivals(platform: Platform, seed: int) -> None:
    rng = random.Random(seed)
    asked = [replace(request, max_tokens=1 + i * i % 13) for i, request in enumerate(requests(seed, count=12))]
    limits: dict[str, Any] = {"capture_sizes": (1, 2, 4), "max_num_requests": 4}
    with decoder(platform, **limits) as made:
        for _ in range(4):
            ids: dict[int, int] = {}
            tokens: dict[int, list[int]] = {}
            cancelled: set[int] = set()
            for i in rng.sample(range(len(asked)), 10):
                ids[made.add(asked[i])] = i
                for _ in range(rng.choice((0, 0, 1, 2))):
                    _take(made, tokens)
                if rng.random() < 0.15:
                    victim = rng.choice(list(ids))
                    cancelled |= {victim} if made.cancel(victim) else set()
            while made.num_unfinished:
                _take(made, tokens)
            started = {request_id: i for request_id, i in ids.items() if tokens.get(request_id)}
            expect_targets_tokens(made, [asked[i] for i in started.values()], [tokens[each] for each in started])
            for request_id in ids.keys() - cancelled:
                wanted = asked[ids[request_id]].max_tokens
                assert len(tokens[request_id]) == wanted, f"{len(tokens[request_id])} tokens of {wanted}"
        assert made.allocator.num_free == made.allocator.capacity


def _take(made: SpeculativeDecoder, tokens: dict[int, list[int]]) -> None:
    """Run one decoder step, and append its tokens to each request's list."""
    for chunk in made.step():
        tokens.setdefault(chunk.request, []).extend(chunk.token_ids)

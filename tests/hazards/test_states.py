"""States of recurrent layers: each request's own, from zeros, behind the accepted rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from specgraph_conformance.decode_rig import decoder, expect_targets_logprobs, requests
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import VOCAB
from specgraph_run.decoder import Request, SpeculativeDecoder
from torch import Tensor

from specgraph.device import Platform


@pytest.mark.hazard("state-not-reset")
def test_states_of_a_new_request(platform: Platform, seed: int) -> None:
    """A request starts from zeros whatever its slot held: numbers, or NaN."""
    asked = requests(seed, count=4, tokens=8)
    with decoder(platform, recurrent=True, logprobs=True) as made:
        states = made.target.states
        for layer in states.layers:
            for tensor in layer:
                tensor[1::2], tensor[2::2] = 0.7, float("nan")
        states.covered.fill_(3)
        expect_targets_logprobs(made, asked, made.generate(asked))


@pytest.mark.hazard("state-shared-by-two-requests")
def test_states_have_one_owner(platform: Platform, seed: int) -> None:
    """Requests that come, end, are cancelled and change rows with rounds in flight have a slot each, and get the tokens
    and log-probabilities that each gets alone."""
    rng = random.Random(seed)
    asked = [replace(each, max_tokens=3 + 5 * (i % 3)) for i, each in enumerate(requests(seed, count=8))]
    limits: dict[str, Any] = {"capture_sizes": (1, 2, 4), "max_num_requests": 4}
    with decoder(platform, **limits, recurrent=True, logprobs=True) as made:
        results = made.generate(asked)
        expect_targets_logprobs(made, asked, results)
        alone = [result.token_ids for result in results]
        for _ in range(2):
            _with_cancels(made, asked, alone, rng)


def _with_cancels(
    made: SpeculativeDecoder, asked: Sequence[Request], alone: Sequence[list[int]], rng: random.Random
) -> None:
    ids = {made.add(request): i for i, request in enumerate(asked)}
    seen: dict[int, list[int]] = {each: [] for each in ids}
    gone: set[int] = set()
    while made.num_unfinished:
        slots = [state.slot for state in made.rounds.running]
        assert len({*slots}) == len(slots), f"requests share slots: {slots}"
        if rng.random() < 0.3 and len(gone) < 4:
            gone.add(victim := rng.choice(sorted(ids)))
            made.cancel(victim)
        for chunk in made.step():
            seen[chunk.request] += chunk.token_ids
    for each, i in ids.items():
        text = alone[i][: len(seen[each])] if each in gone else alone[i]
        assert seen[each] == text, f"request {i} in company: {seen[each]}, alone: {text}"


@pytest.mark.hazard("state-written-by-rejected-rows")
def test_states_and_rejected_rows(platform: Platform, seed: int) -> None:
    """A verify that runs again over the same rows gives the same bits of logits and states, also if its rejected drafts
    differ, and the round after it too."""
    asked = requests(seed, count=2, tokens=30)
    with decoder(platform, recurrent=True, rounds_ahead=0) as made:
        for request in asked:
            made.add(request)
        for _ in range(3):
            made.step()
        target, n = made.target, made.config.sizes[0]
        program = target.verify_programs[False]
        b, query_len = program.sliced(n, made.query_len), made.query_len
        ready = made.stages.find(len(made.rounds.rows), query_len)
        verify = ready.stages[-1]
        for stage in ready.stages[:-1]:
            stage(None if not target.attention.host_parameters else _host(made))
        first = b.draft_token_ids.clone()
        kept: list[list[Tensor]] = []
        for change in (0, 0, 1, 7):
            b.draft_token_ids.copy_((first + change) % VOCAB)
            starts, counts = target.shared.start_positions.clone(), target.shared.num_sampled.clone()
            verify(None if not target.attention.host_parameters else _host(made))
            kept.append([on_host(layer.state).clone() for layer in made.target.states.layers])
            target.shared.start_positions.copy_(starts)
            target.shared.num_sampled.copy_(counts)
        for again in kept[1:]:
            for a, b_ in zip(again, kept[0], strict=True):
                expect_equal(a, b_, "states behind the folded rows")


def _host(made: SpeculativeDecoder) -> Any:
    from specgraph_run.decoder.round_stages import HostState

    counts = [state.num_sampled for state in made.rounds.running]
    return HostState([state.position - state.num_sampled for state in made.rounds.running], counts)

"""States of recurrent layers (gated delta nets) through rounds: each request's own, behind the accepted rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from specgraph.device import Platform
from specgraph_run.decoder import Request, SpeculativeDecoder
from specgraph_run.decoder.states import RequestStates
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_targets_logprobs, generate, requests
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import VOCAB

WITH_LOGPROBS: dict[str, Any] = {"recurrent": True, "logprobs": True}


def states_of(made: SpeculativeDecoder) -> RequestStates:
    """Return the states of a decoder whose target is recurrent."""
    assert made.target.states is not None
    return made.target.states


def snapshot(made: SpeculativeDecoder) -> list[Tensor]:
    """Return copies of the states of all slots, in host memory."""
    return [on_host(tensor).clone() for layer in states_of(made).layers for tensor in layer]


@case(
    "decoding.states-follow-accepted-rows",
    "A target with a recurrent layer gives each token the log-probability of a float64 target without folds, however "
    "many drafts each round accepts, for prompts on both sides of K + 1, of a chunk and of the convolution's kernel.",
    hazard="state-rolled-back-wrong",
    cause="a state or a convolution's window behind another row than the last accepted one, a prompt of K + 1 tokens "
    "that is taken for a verify, padding rows of a prompt that advance the state, or a decay after the correction",
    timeout=120,
)
def test_accepted(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (1, 5, 17, 4)
    asked = [
        Request(prompt_token_ids=torch.randint(0, VOCAB, (n,), generator=generator).tolist(), max_tokens=12)
        for n in lengths
    ]
    with decoder(platform, prefill_sizes=(5, 16), **WITH_LOGPROBS) as made:
        results = made.generate(asked)
        expect_targets_logprobs(made, asked, results)
        accepted = made.metrics.accepted
    assert accepted[0] > accepted[-1] > 0, "drafts must be accepted at several lengths"


@case(
    "decoding.states-without-drafts",
    "Where K changes with the batch, also to 0, each token has the log-probability of a float64 target.",
    hazard="state-round-without-drafts",
    cause="rings whose size depends on K, or a round without drafts that reads the state of another row",
)
def test_schedule(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=4)
    options: dict[str, Any] = {"draft_schedule": {1: 4, 2: 0, 3: 1}, "capture_sizes": (1, 2, 3)}
    with decoder(platform, **options, **WITH_LOGPROBS) as made:
        expect_targets_logprobs(made, asked, made.generate(asked))


@case(
    "decoding.states-of-a-new-request",
    "A request starts from zeros whatever its slot held: numbers, or NaN.",
    hazard="state-not-reset",
    cause="a state, records, a window or a count of the slot's last owner",
)
def test_new(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=4, tokens=8)
    with decoder(platform, **WITH_LOGPROBS) as made:
        states = states_of(made)
        for layer in states.layers:
            for tensor in layer:
                tensor[1::2], tensor[2::2] = 0.7, float("nan")
        states.covered.fill_(3)
        expect_targets_logprobs(made, asked, made.generate(asked))


@case(
    "decoding.states-have-one-owner",
    "Requests that come, end, are cancelled and change rows with rounds in flight have a slot each, and get the tokens "
    "and log-probabilities that each gets alone.",
    hazard="state-shared-by-two-requests",
    cause="two requests with one slot, or a slot that follows the row",
)
def test_owners(platform: Platform, seed: int) -> None:
    rng = random.Random(seed)
    asked = [replace(each, max_tokens=3 + 5 * (i % 3)) for i, each in enumerate(requests(seed, count=8))]
    limits: dict[str, Any] = {"capture_sizes": (1, 2, 4), "max_num_requests": 4}
    with decoder(platform, **limits, **WITH_LOGPROBS) as made:
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


@case(
    "decoding.states-of-others",
    "A round changes the states of its own requests alone: those of other slots and the null slot keep their bits "
    "while padded requests and prompts run, and while graphs are captured.",
    hazard="state-advanced-by-padding",
    cause="padded or inert requests that run through the state of slot 0 or of a neighbour, or a capture's warm-up",
)
def test_others(platform: Platform, seed: int) -> None:
    with decoder(platform, recurrent=True, max_num_requests=4, capture_sizes=(4,)) as made:
        assert not any(bool(tensor.any()) for tensor in snapshot(made)), "a capture changed a state"
        for layer in states_of(made).layers:
            for tensor in layer:
                tensor.fill_(0.25)
        before = snapshot(made)
        generate(made, requests(seed, count=1))
        for a, b in zip(snapshot(made), before, strict=True):
            expect_equal(a[0], b[0], "the null slot's state")
            expect_equal(a[2:], b[2:], "states of slots without a request")
            assert not torch.equal(a[1], b[1]), "the request's own state"


@case(
    "decoding.states-and-rejected-rows",
    "A verify that runs again over the same rows gives the same bits of logits and states, also if its rejected drafts "
    "differ, and the round after it too.",
    hazard="state-written-by-rejected-rows",
    cause="rejected rows in the state, a fold that a second run repeats, or records that are read as if accepted",
)
def test_rejected(platform: Platform, seed: int) -> None:
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
            kept.append([on_host(layer.state).clone() for layer in states_of(made).layers])
            target.shared.start_positions.copy_(starts)
            target.shared.num_sampled.copy_(counts)
        for again in kept[1:]:
            for a, b_ in zip(again, kept[0], strict=True):
                expect_equal(a, b_, "states behind the folded rows")


def _host(made: SpeculativeDecoder) -> Any:
    from specgraph_run.decoder.round_stages import HostState

    counts = [state.num_sampled for state in made.rounds.running]
    return HostState([state.position - state.num_sampled for state in made.rounds.running], counts)

"""States of recurrent layers (gated delta nets) through rounds: each request's own, behind the accepted rows."""

from __future__ import annotations

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

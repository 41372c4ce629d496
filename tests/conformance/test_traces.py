"""Golden traces: replayed through transformers' own generators, and failed by drafters that are wrong in one thing."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from specgraph_conformance.traces import Trace, TraceMismatch, TraceRound, load_trace, names, replay
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("draft-model")


@pytest.fixture(scope="module")
def model(trace: Trace) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(trace.folder, dtype=torch.float32).eval()


def test_what_the_trace_holds(trace: Trace) -> None:
    assert names() == ["draft-model"]
    ids = [{request.id for request in round.requests} for round in trace.rounds]
    assert len(set.union(*ids)) == 6
    assert any(a - b for a, b in pairwise(ids)), "no request leaves"
    assert sum(request.joins for round in trace.rounds for request in round.requests) == 6
    counts = {request.num_sampled for round in trace.rounds for request in round.requests if not request.joins}
    assert counts == set(range(1, trace.num_speculative_tokens + 2)), "some accepted counts are missing"
    assert trace.margin >= 0.25
    for before, after in pairwise(trace.rounds):
        earlier = {request.id: request for request in before.requests}
        for request in after.requests:
            if request.id in earlier:
                accepted = request.token_ids[-request.num_sampled :][:-1]
                assert accepted == earlier[request.id].drafts[: len(accepted)]
                assert request.token_ids[: -request.num_sampled] == earlier[request.id].token_ids


def test_transformers_assisted_generation(trace: Trace, model: Any) -> None:
    """One `AssistedCandidateGenerator` a request: it keeps a KV cache and crops what was rejected."""
    generators: dict[int, AssistedCandidateGenerator] = {}
    k = trace.num_speculative_tokens
    model.generation_config.num_assistant_tokens = k
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0

    def propose(round: TraceRound) -> list[list[int]]:
        drafts = list[list[int]]()
        for request in round.requests:
            ids = torch.tensor([request.token_ids])
            if request.joins:
                generators[request.id] = AssistedCandidateGenerator(
                    ids,
                    model,
                    GenerationConfig(max_length=200, min_length=0, do_sample=False),
                    {"attention_mask": ids * 0 + 1},
                )
            candidates, _ = generators[request.id].get_candidates(ids)
            drafts.append(candidates[0, ids.shape[1] :].tolist())
        return drafts

    assert replay(trace, propose) == 4 * sum(len(round.requests) for round in trace.rounds)


def test_transformers_generate_without_a_cache(trace: Trace, model: Any) -> None:
    def one(token_ids: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([token_ids])
        out = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=4, do_sample=False, use_cache=False)
        return out[0, ids.shape[1] :].tolist()

    replay(trace, lambda round: [one(request.token_ids) for request in round.requests])


class Cached:
    """A drafter with a KV cache a request, written by hand; `keep_rejected` forgets to crop the rejected drafts."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32, keep_rejected: bool = False) -> None:
        self.model, self.keep_rejected = model.to(dtype), keep_rejected
        self.caches: dict[int, Any] = {}

    @torch.no_grad()
    def propose(self, round: TraceRound) -> list[list[int]]:
        drafts = list[list[int]]()
        for request in round.requests:
            cache = self.caches.setdefault(request.id, DynamicCache())
            if not self.keep_rejected and not request.joins:
                kept = request.start_position + 1
                if (rejected := cache.get_seq_length() - kept) > 0:
                    cache.crop(-rejected)
            ids = request.token_ids if request.joins else request.token_ids[-request.num_sampled :]
            drafted = list[int]()
            for _ in request.drafts:
                logits = self.model(torch.tensor([ids]), cache=cache).logits[0, -1]
                drafted.append(int(logits.argmax()))
                ids = (drafted[-1],)
            drafts.append(drafted)
        return drafts


def test_bfloat16_gives_the_same_tokens(trace: Trace) -> None:
    model = AutoModelForCausalLM.from_pretrained(trace.folder, dtype=torch.bfloat16).eval()
    replay(trace, Cached(model, torch.bfloat16).propose)


def test_a_drafter_that_keeps_rejected_tokens_is_failed(trace: Trace, model: Any) -> None:
    replay(trace, Cached(model).propose)
    with pytest.raises(TraceMismatch, match=r"round \d+, request \d+ \(\d+ tokens, \d of 4 drafts accepted"):
        replay(trace, Cached(model, keep_rejected=True).propose)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda drafts: [row[:-1] for row in drafts], "3 draft tokens, expected 4"),
        (lambda drafts: drafts[:-1], "drafts for 1 requests, there are 2"),
        (lambda drafts: drafts[::-1], r"round 0, request 0 \(6 tokens, just joined\): draft 0 is 47, expected 63"),
    ],
)
def test_a_mismatch_says_where(trace: Trace, change: Any, said: str) -> None:
    with pytest.raises(TraceMismatch, match=said):
        replay(trace, lambda round: change([list(request.drafts) for request in round.requests]))

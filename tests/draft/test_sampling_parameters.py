"""Drafts that follow the sampling parameters of their request: against float64, and the same in every lowering."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target
from draft.rounds import LoggedHead, RandomBatches, caches_equal
from served_distribution import served
from specgraph_run.decoder import SamplingBuffers, allocate_sampling

from specgraph.attention import allocate_caches
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter

K, REQUESTS = 3, 5
PROMPT, OUTPUT = [3, 8, 13, 21], [5, 5, 8, 30]
ASKED = [
    {"top_k": 4, "frequency_penalty": 2.0},
    {"top_p": 0.6, "repetition_penalty": 1.7, "presence_penalty": -0.7},
    {"frequency_penalty": 3.0, "logit_bias": dict.fromkeys(range(0, VOCAB, 3), -100.0)},
    {"min_p": 0.3, "logit_bias": {7: 5.0}},
    {"presence_penalty": 4.0, "top_k": 6, "top_p": 0.8},
]


def asked() -> SamplingBuffers:
    """Row i asks for ASKED[i] after PROMPT and OUTPUT."""
    buffers = allocate_sampling(REQUESTS, VOCAB, torch.device("cpu"))
    buffers.in_prompt[:, PROMPT] = True
    buffers.output_counts.copy_(torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB))
    for row, parameters in enumerate(ASKED):
        for name, value in parameters.items():
            if name == "logit_bias":
                buffers.bias[row, list(value)] = torch.tensor(list(value.values()))
            else:
                getattr(buffers, name)[row] = value
    return buffers


def make_drafter(head, lowering: str, sampled: bool = True) -> Drafter:
    platform = CpuPlatform()
    config = DraftConfig(
        num_speculative_tokens=K, max_num_requests=REQUESTS, max_model_len=48, block_size=4, decode=lowering,
        capture_sizes=[2, REQUESTS], prefill="eager", sampled=sampled, check_inputs=True,
    )  # fmt: skip
    caches = allocate_caches(head.attention_layers, 1 + 12 * REQUESTS, 4, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, config, sampling=asked())
    if isinstance(head, LoggedHead):
        head.draft_step = drafter.buffers.draft_step
    with torch.inference_mode():
        drafter.capture()
    return drafter


@pytest.mark.parametrize(("kind", "sampled"), [("eagle3", False), *((kind, True) for kind in DRAFTERS)])
def test_every_lowering_drafts_what_eager_drafts(kind, sampled):
    head = make_head(kind, make_target())
    drafters = {way: make_drafter(head, way, sampled) for way in ("eager", "step", "merged")}
    eager = drafters["eager"]
    rounds = RandomBatches(eager.config, head.aux_size, VOCAB, head.dtype, seed=5)
    for number in range(3):
        batch = rounds.next(num_requests=(5, 1, 4)[number])
        with torch.inference_mode():
            expected = eager.propose(batch)
            for way, drafter in drafters.items():
                result = drafter.propose(batch)
                assert torch.equal(result.token_ids, expected.token_ids), (way, number)
                assert not sampled or torch.equal(result.probs, expected.probs), (way, number)
                assert caches_equal(drafter.caches, eager.caches), (way, number)
    for drafter in drafters.values():
        drafter.close()


@pytest.mark.parametrize("wrong", ["", "another request's", "drafts not in the context"])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
def test_each_draft_follows_its_context(kind, wrong, monkeypatch):
    """The float64 oracle makes each step's distribution from raw logits: the request's output and its drafts count.
    "eagle3" has a draft vocabulary of its own."""
    real = SamplingBuffers.adjusted_drafts
    if wrong == "another request's":
        monkeypatch.setattr(
            SamplingBuffers, "adjusted_drafts", lambda self, x, *rest: real(self, x.roll(1, 0), *rest).roll(-1, 0)
        )
    elif wrong:
        monkeypatch.setattr(SamplingBuffers, "adjusted_drafts", lambda self, *some: real(self, *some[:3]))
    plain = make_head(kind, make_target())
    logged = LoggedHead(plain, torch.zeros(K, REQUESTS, plain.draft_vocab_size))
    drafter = make_drafter(logged, "merged")
    offset = plain.draft_to_target
    ids = torch.arange(plain.draft_vocab_size) + (0 if offset is None else offset)
    rounds = RandomBatches(drafter.config, plain.aux_size, VOCAB, plain.dtype, seed=2)
    largest = 0.0
    for _ in range(4):
        batch = rounds.next(num_requests=REQUESTS)
        with torch.inference_mode():
            result = drafter.propose(batch)
        for row in range(REQUESTS):
            for step in range(K):
                logits = torch.full((VOCAB,), -1e9)
                logits[ids] = logged.log[step, row]
                context = [*OUTPUT, *result.token_ids[row, :step].tolist()]
                warm = float(batch.temperature[row])
                wanted = torch.tensor(served(logits.tolist(), PROMPT, context, warm, **ASKED[row]))[ids]
                largest = max(largest, float((result.probs[row, step] - wanted).abs().max()))
    drafter.close()
    assert (largest < 1e-4) is not bool(wrong), largest

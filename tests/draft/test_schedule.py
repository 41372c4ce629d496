"""K by batch, down to none: what a batch without drafts leaves behind for those after it."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target
from draft.rounds import Rounds
from draft.test_drafters_bit_equal import make_drafter

from specgraph.attention import PagedAttention
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder

SETTINGS = {"num_speculative_tokens": 3, "max_num_requests": 2, "max_model_len": 48, "capture_sizes": [1, 2]}


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "mtp-modules"])
@pytest.mark.parametrize(("lowering", "lengths"), [("merged", "device"), ("step", "host")])
def test_kv_is_complete_after_rounds_without_drafts(kind, lowering, lengths):
    """Later drafts are those of a drafter that always drafted. (A head's later modules have no KV of such rounds.)"""
    head = make_head(kind, make_target())
    always = make_drafter(head, "eager", "device", **SETTINGS)
    at_times = make_drafter(head, lowering, lengths, draft_schedule={1: 3, 2: 0}, **SETTINGS)
    rounds = Rounds(always.config, head.aux_size, VOCAB, head.dtype, seed=7)
    for n in (2, 2, 1, 1, 2, 1):
        batch = rounds.next(n)
        with torch.inference_mode():
            wanted, got = always.propose(batch), at_times.propose(batch)
        assert got.token_ids.shape == (n, 3 if n == 1 else 0)
        assert torch.equal(got.token_ids, wanted.token_ids[:, : got.token_ids.shape[1]])


@pytest.mark.parametrize("settings", [{}, {"sampled": True}, {"synthetic_acceptance": 0.5}], ids=str)
@pytest.mark.parametrize("decode", ["eager", "merged"])
def test_a_decoder_that_drafts_for_small_batches_only(settings, decode):
    target = make_target()
    requests = [Request(prompt_token_ids=[3, 5 + i], max_tokens=m) for i, m in enumerate((5, 9, 16))]

    def generate(head, **more):
        config = EngineConfig(
            num_speculative_tokens=3, max_num_requests=3, max_model_len=48, decode=decode, prefill_sizes=[8], **more
        )
        with torch.inference_mode():
            decoder = SpeculativeDecoder(target, head, CpuPlatform(), config, attention=PagedAttention())
            decoder.capture()
            return decoder, [result.token_ids for result in decoder.generate(requests)]

    decoder, tokens = generate(make_head("eagle", target), draft_schedule={1: 3, 3: 0}, **settings)
    if "synthetic_acceptance" not in settings:
        assert tokens == generate(None)[1]
    assert [len(t) for t in tokens] == [5, 9, 16]
    # Of the longest request, the first 9 tokens came one per round while others ran; drafts are counted after that.
    assert decoder.metrics.rounds > decoder.metrics.num_drafts > 0
    assert decoder.metrics.num_drafts <= 16 - 9 + 1

"""K by batch, down to none: what a batch without drafts leaves behind for those after it."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import make_head, make_target
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph.attention import PagedAttention
from specgraph.cpu import CpuPlatform


@pytest.mark.parametrize("settings", [{}, {"sampled": True}, {"synthetic_acceptance": 0.5}], ids=str)
@pytest.mark.parametrize("decode", ["eager", "merged"])
def test_a_decoder_that_drafts_for_small_batches_only(settings, decode):
    target = make_target()
    requests = [Request(prompt_token_ids=[3, 5 + i], max_tokens=m) for i, m in enumerate((5, 9, 16))]

    def generate(head, **more):
        config = decoder_settings(
            num_speculative_tokens=3, max_num_requests=3, max_model_len=48, decode=decode, prefill_sizes=[8], **more
        )
        with torch.inference_mode():
            decoder = SpeculativeDecoder(target, head, CpuPlatform(), *config, attention=PagedAttention())
            decoder.capture()
            return decoder, [result.token_ids for result in decoder.generate(requests)]

    decoder, tokens = generate(make_head("eagle", target), draft_schedule={1: 3, 3: 0}, **settings)
    if "synthetic_acceptance" not in settings:
        assert tokens == generate(None)[1]
    assert [len(t) for t in tokens] == [5, 9, 16]
    # Of the longest request, the first 9 tokens came one per round while others ran; drafts are counted after that.
    assert decoder.metrics.rounds > decoder.metrics.num_drafts > 0
    assert decoder.metrics.num_drafts <= 16 - 9 + 1

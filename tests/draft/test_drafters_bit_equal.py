"""Every kind of drafter: each lowering, with device and host lengths, gives the tokens and KV caches of eager."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target
from draft.rounds import Rounds, caches_equal

from specgraph.attention import choose_attention
from specgraph.capture import BatchDescriptor
from specgraph.device.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter
from specgraph.engine import allocate_caches

LOWERINGS = ("eager", "piecewise", "step", "merged")
WAYS = [(lowering, lengths) for lengths in ("device", "host") for lowering in LOWERINGS]


def make_drafter(head, lowering, attention, capture=True, **settings):
    """attention: a backend, or "device" or "host" for the core's own."""
    platform = CpuPlatform()
    config = DraftConfig(decode=lowering, **{"block_size": 4, "check_inputs": True, **settings})
    blocks = 1 + -(-(config.max_model_len + config.scratch_tokens) // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
    if isinstance(attention, str):
        attention = choose_attention(attention, platform).backend
    drafter = Drafter(head, caches, platform, config, attention=attention)
    if capture:
        with torch.inference_mode():
            drafter.capture()
    return drafter


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "k", "dtype"),
    [*((kind, 3, torch.float32) for kind in DRAFTERS), ("eagle3", 1, torch.float32), ("eagle3", 2, torch.bfloat16),
     ("eagle3", 7, torch.bfloat16)],
)  # fmt: skip
def test_bit_equal(kind, k, dtype, sampled):
    head = make_head(kind, make_target(dtype))
    settings = {
        "num_speculative_tokens": k, "max_num_requests": 5, "max_model_len": 48, "capture_sizes": [1, 2, 5],
        "prefill_sizes": [4],  # prompts are test_matrix.py's
    }  # fmt: skip
    drafters = {way: make_drafter(head, *way, sampled=sampled, **settings) for way in WAYS}
    eager = drafters["eager", "device"]
    rounds = Rounds(eager.config, head.aux_size, VOCAB, head.dtype, seed=5)
    passes = eager.program.num_steps(BatchDescriptor("propose", 5, k + 1, k))
    for number in range(8):
        batch = rounds.next(num_requests=(1, 5, 2, 4)[number] if number < 4 else None)
        with torch.inference_mode():
            results = {way: drafter.propose(batch) for way, drafter in drafters.items()}
        expected = results["eager", "device"]
        assert expected.token_ids.shape == (batch.num_requests, k)
        for way, result in results.items():
            assert torch.equal(result.token_ids, expected.token_ids), (way, number)
            assert caches_equal(drafters[way].caches, eager.caches), (way, number)
            if sampled:
                assert torch.equal(result.probs, expected.probs), (way, number)
    for (lowering, _), drafter in drafters.items():
        launches = {"merged": 1, "step": passes, "eager": 0}.get(lowering)
        if launches is not None:
            assert drafter.launches["propose"] == launches * drafter.num_proposes
        assert not any(part[0].any() for part in drafter.caches[0]), "the null block was written"
        drafter.close()

"""Limits of a decoder: batches smaller than a captured size, max_model_len, and the device's memory."""

from __future__ import annotations

import pytest
import torch
from specgraph.attention import AttentionLayer, allocate_caches
from specgraph.device import Platform
from specgraph.errors import CapacityError
from specgraph_run.decoder import Request

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_lossless, requests
from specgraph_conformance.rig import expect_refusal
from specgraph_conformance.tiny_models import VOCAB


@pytest.mark.parametrize("count", [1, 2])
@case(
    "decoding.padded-batches",
    "Batches padded to a larger captured size decode the same tokens.",
    hazard="num-reqs-unpadded",
    cause="host lengths, counts or tables with one entry per real request instead of one per padded request",
)
def test_padded(platform: Platform, attention: str, count: int, seed: int) -> None:
    expect_lossless(platform, requests(seed, count=count, tokens=12), attention=attention)


@case(
    "decoding.up-to-max-model-len",
    "A request that runs into max_model_len ends there with the target's tokens.",
    hazard="max-len-clamp",
    cause="draft steps past the end that write another request's KV or read past the rotary table",
)
def test_end(platform: Platform, attention: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (20, 29, 31)]
    asked = [Request(prompt_token_ids=prompt, max_tokens=50) for prompt in prompts]
    with decoder(platform, attention=attention, max_model_len=32) as speculative:
        ours = speculative.generate(asked)
    with decoder(platform, attention=attention, max_model_len=32, kind=None) as plain:
        theirs = plain.generate(asked)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert [len(r.token_ids) for r in ours] == [12, 3, 1]
    assert {r.finish_reason for r in ours} == {"length"}


@case(
    "decoding.cache-that-does-not-fit",
    "KV caches that the device has no memory for are a CapacityError that names their size, and the platform stays "
    "usable.",
    hazard="cache-too-large",
    cause="the allocator's error of this device is no RuntimeError, or the size in the message is wrong",
)
def test_cache(platform: Platform) -> None:
    layers = [AttentionLayer(2, 2, 64, 0.125)] * 3
    blocks = 1 << 36
    tebibytes = 3 * 2 * 2 * 64 * 4 * 16 * blocks // (1 << 40)  # layers, key and value, heads, head_dim, float32, block
    expect_refusal(
        lambda: allocate_caches(layers, blocks, 16, torch.float32, platform.device),
        f"a KV cache of {tebibytes} TiB",
        rf"\b{tebibytes * 1024}\.00 GiB",
        (CapacityError,),
    )
    assert torch.ones(4, device=platform.device).sum().item() == 4.0

"""Admission: accepted, refused and cancelled requests, their KV blocks, and metrics without drafts."""

from __future__ import annotations

import torch
from specgraph.attention import AttentionLayer, allocate_caches
from specgraph.device import Platform
from specgraph.errors import CapacityError

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_refusal


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

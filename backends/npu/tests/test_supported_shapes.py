"""Attention supports what the runtime takes with all its limits on; pairs of such shapes draft alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from specgraph_npu.attention import make_attention

from specgraph.attention import AttentionLayer, ForwardContext, HostLengths, allocate_caches, choose_attention
from specgraph.attention.metadata import allocate_block_table, allocate_metadata

pytestmark = pytest.mark.usefixtures("all_limits")

LAYERS = [
    AttentionLayer(heads, kv_heads, dim, 1.0)
    for (heads, kv_heads), dim in itertools.product(((4, 1), (2, 2)), (32, 64, 128, 192, 256))
]
LATENT = [
    AttentionLayer(heads, 1, 512 + rope, 1.0, torch.ones(8, rope), latent=True)
    for heads, rope in ((4, 64), (6, 64), (4, 32))
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKS = (16, 64, 128, 192, 512, 1024)


def runs(npu, attention, layer: AttentionLayer, dtype: torch.dtype, block: int) -> bool:
    """Return whether one request of two rows, and one of one row, go through."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=npu.device)

    if layer.rotary is not None:
        layer = replace(layer, rotary=layer.rotary.to(npu.device))
    (cache,) = allocate_caches([layer], 2, block, dtype, npu.device)
    for rows in (2, 1):
        metadata = allocate_metadata(1, [rows], allocate_block_table(1, 2, npu.device))
        query, key = zeros(rows, layer.num_heads, layer.head_dim), zeros(rows, layer.num_kv_heads, layer.head_dim)
        context = ForwardContext(metadata, 0, HostLengths([rows], [rows]))
        try:
            attention.forward(layer, 0, query, key, key, cache, context)
        except RuntimeError as error:
            if "limit 'fia-" in str(error) or "PagedAttentionOperation setup failed" in str(error):
                return False
            raise
    return True


@pytest.mark.parametrize("name", ["fia", "fia-v2", "fia-mla", "atb-paged"])
def test_supports_is_what_the_runtime_takes(npu, runtime, name):
    attention = make_attention(npu, name)
    layers = LATENT if attention.row.is_latent else LAYERS
    with torch.inference_mode():
        for layer, dtype, block in itertools.product(layers, DTYPES, BLOCKS):
            answer = attention.supports(layer, dtype, block)
            assert bool(answer) == runs(npu, attention, layer, dtype, block), (layer, dtype, block, answer)
            assert answer or "it takes" in answer.reason


def test_auto_takes_the_device_s_op_where_it_can(npu, runtime):
    small, large = AttentionLayer(4, 2, 32, 1.0), AttentionLayer(4, 2, 128, 1.0)
    choice = choose_attention("auto", npu, [large], torch.bfloat16)
    assert (choice.backend.name, choice.block_size, choice.reason) == ("fia", 128, "")
    choice = choose_attention("auto", npu, [large, small], torch.bfloat16)
    assert (choice.backend.name, choice.block_size) == ("atb-paged", 128)
    assert "attention 'fia': 4 heads of 32 over 2 key heads; it takes a head_dim of 128" in choice.reason
    choice = choose_attention("auto", npu, [large, replace(small, window=4)], torch.bfloat16)
    assert (choice.backend.name, choice.block_size) == ("paged", 16)
    latent = LATENT[0]
    choice = choose_attention("auto", npu, [latent], torch.bfloat16)
    assert (choice.backend.name, choice.block_size) == ("fia-mla", 128)
    assert choose_attention("auto", npu, [latent, large], torch.bfloat16).backend.name == "paged"
    assert not make_attention(npu, "fia-mla").supports(replace(latent, window=4), torch.bfloat16, 128)

"""KV blocks: each has one owner, and there are as many as the batch needs or the memory allows, else one line."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specgraph_run import load_generator
from specgraph_run.decoder.blocks import BlockAllocator, size_cache
from specgraph_run.text.load import shipped_pair

from specgraph.attention import AttentionLayer, allocate_caches
from specgraph.attention.caches import bytes_per_token
from specgraph.cpu.platform import CpuPlatform
from specgraph.device.interface import MemoryInfo
from specgraph.errors import CapacityError, ConfigError, SpecgraphError

LLAMA_8B = 32 * 2 * 8 * 128 * 2
"""Bytes per token: layers, keys and values, heads, head_dim, bfloat16; 128 KiB."""
SETTINGS = {"block_size": 16, "max_model_len": 131072, "max_num_requests": 4}


class Small(CpuPlatform):
    """A device on which so many bytes are free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def memory(self) -> MemoryInfo:
        return MemoryInfo(0, 0, 1 << 40, self.free)


def test_bytes_of_a_token():
    layer = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0, rotary=None, causal=True)
    assert bytes_per_token([layer] * 32, torch.bfloat16) == LLAMA_8B == 131072


def test_latents_are_stored_once():
    """DeepSeek-V3: 512 + 64 elements per token and layer, as its report says."""
    layer = AttentionLayer(128, 1, 576, 1.0, latent=True)
    assert bytes_per_token([layer] * 61, torch.bfloat16) == 61 * 576 * 2
    (cache,) = allocate_caches([layer], 3, 4, torch.bfloat16, torch.device("cpu"))
    assert cache.value is cache.key
    assert cache.key.shape == (3, 4, 1, 576)


def test_with_enough_memory_it_is_what_the_batch_needs():
    size = size_cache(LLAMA_8B, memory=100 << 30, **SETTINGS)
    assert (size.num_blocks, size.max_model_len) == (1 + 4 * 8192, 131072)
    assert size.num_bytes == size.num_blocks * 16 * LLAMA_8B
    assert "64.00 GiB: 32769 blocks of 16, 524288 tokens, 4.0 requests of 131072" in str(size)


def test_with_less_it_is_what_the_memory_holds():
    size = size_cache(LLAMA_8B, memory=40 << 30, **SETTINGS)
    assert size.num_bytes <= 40 << 30 < size.num_bytes + 16 * LLAMA_8B
    assert size.max_model_len == 131072
    assert "2.5 requests of 131072" in str(size)


def test_a_length_that_does_not_fit_is_lowered_or_refused():
    with pytest.raises(CapacityError, match=r"8\.00 GiB holds 65520 tokens.* 131072.*lower max_model_len"):
        size_cache(LLAMA_8B, memory=8 << 30, **SETTINGS)
    size = size_cache(LLAMA_8B, memory=8 << 30, may_shorten=True, **SETTINGS)
    assert size.max_model_len == 65520
    with pytest.raises(CapacityError, match="holds 0 tokens"):
        size_cache(LLAMA_8B, memory=1 << 20, may_shorten=True, **SETTINGS)


def test_blocks_that_are_asked_for_and_memory_that_is_unknown():
    assert size_cache(LLAMA_8B, memory=1 << 20, num_blocks=77, **SETTINGS).num_blocks == 77
    assert size_cache(LLAMA_8B, memory=None, **SETTINGS).num_blocks == 1 + 4 * 8192


def test_a_pair_on_a_small_device_runs_with_fewer_positions():
    """The rotary table has one row per position that is used, and the tokens are those of a large device."""
    config = json.loads((shipped_pair()[0] / "config.json").read_text())
    per_token = (config["num_hidden_layers"] + 1) * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    settings = {"max_num_requests": 2, "capture_sizes": [2], "prefill_sizes": [16], "decode": "merged"}
    generators = [
        load_generator(platform=Small(free), memory_fraction=0.5, **settings)
        for free in (2 * per_token * 16 * 9, 1 << 40)
    ]
    small, large = generators
    assert small.decoder.config.max_model_len == 8 * 16
    assert small.decoder.target.model.attention_layers[0].rotary.shape[0] == 8 * 16
    assert "9 blocks of 16, 128 tokens, 1.0 requests of 128" in small.description
    assert large.decoder.config.max_model_len == 1024
    assert "2.0 requests of 1024" in large.description
    prompts = ["def read_chunk(self, size):\n", "import os\n"]
    assert small.text(prompts, max_tokens=12) == large.text(prompts, max_tokens=12)
    for generator in generators:
        generator.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_len": 512}, CapacityError, "max_model_len"),
        ({"kv_memory": 1e-6}, CapacityError, "kv_memory"),
        ({"kv_memory": float("nan")}, ConfigError, "kv_memory"),
        ({"memory_fraction": 1.5}, ConfigError, "memory_fraction"),
        ({"num_blocks": 1}, ConfigError, "num_blocks must be at least 2"),
    ],
)
def test_options_that_cannot_be_met(options, error, words):
    with pytest.raises(error, match=words):
        load_generator(platform=Small(1 << 20), **options)


def test_memory_that_the_device_refuses_is_one_line():
    layer = AttentionLayer(num_heads=1, num_kv_heads=1024, head_dim=1024, scale=1.0, rotary=None, causal=True)
    with pytest.raises(SpecgraphError, match="could not be allocated; lower num_blocks") as caught:
        allocate_caches([layer] * 4, 1 << 30, 1 << 10, torch.float32, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_no_block_has_two_owners(num_blocks, actions):
    allocator, owners = BlockAllocator(num_blocks), []
    assert allocator.capacity == num_blocks - 1
    for take, count in actions:
        taken = [block for blocks in owners for block in blocks]
        if take and count <= allocator.num_free:
            owners.append(allocator.allocate(count))
        elif take:
            with pytest.raises(CapacityError, match=f"{count} KV blocks were asked for, {allocator.num_free} of"):
                allocator.allocate(count)
            assert allocator.num_free == allocator.capacity - len(taken)
        elif owners:
            allocator.free(owners.pop(count % len(owners)))
        taken = [block for blocks in owners for block in blocks]
        assert len(taken) == len(set(taken))
        assert all(0 < block < num_blocks for block in taken)  # 0 is the null block
        assert allocator.num_free == allocator.capacity - len(taken)


@pytest.mark.parametrize("wrong", [lambda a, b: b, lambda a, b: [0], lambda a, b: [a[0], a[0]], lambda a, b: [99]])
def test_giving_back_what_is_not_owned_is_an_error(wrong):
    allocator = BlockAllocator(6)
    mine, others = allocator.allocate(2), allocator.allocate(2)
    allocator.free(others)
    with pytest.raises(ConfigError, match="given back"):
        allocator.free(wrong(mine, others))
    assert allocator.num_free == 3
    allocator.free(mine)
    assert allocator.num_free == 5


def test_caches_have_each_layers_own_shape():
    layers = [AttentionLayer(4, 2, 8, 1.0), AttentionLayer(6, 1, 16, 1.0)]
    caches = allocate_caches(layers, 5, 4, torch.bfloat16, torch.device("cpu"))
    assert [tuple(c.key.shape) for c in caches] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    assert all(c.key.shape == c.value.shape and c.key.dtype == torch.bfloat16 for c in caches)
    pointers = {t.data_ptr() for c in caches for t in c}
    assert len(pointers) == 4

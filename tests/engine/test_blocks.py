"""The block allocator against a set of what is handed out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specgraph.attention import AttentionLayer
from specgraph.engine import BlockAllocator
from specgraph.engine.blocks import allocate_caches
from specgraph.errors import CapacityError, ConfigError


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


@pytest.mark.parametrize("num_blocks", [1, 0, -4])
def test_a_cache_of_the_null_block_alone_is_refused(num_blocks):
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        BlockAllocator(num_blocks)


def test_caches_have_each_layers_own_shape():
    layers = [AttentionLayer(4, 2, 8, 1.0), AttentionLayer(6, 1, 16, 1.0)]
    caches = allocate_caches(layers, 5, 4, torch.bfloat16, torch.device("cpu"))
    assert [tuple(c.key.shape) for c in caches] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    assert all(c.key.shape == c.value.shape and c.key.dtype == torch.bfloat16 for c in caches)
    pointers = {t.data_ptr() for c in caches for t in c}
    assert len(pointers) == 4

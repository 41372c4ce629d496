"""Rotation and cache writes, the capturable reference and the host implementation, against float64 and a row loop."""

from __future__ import annotations

import math

import pytest
import torch

from specgraph import ops

BLOCKS, BLOCK_SIZE = 5, 4


IMPLEMENTATIONS = {"reference": ops.rotate_and_store.reference, "host": ops.rotate_and_store}


def table(positions: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] / 1000.0 ** (torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def rotated64(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Each pair (i, i + half) is a complex number, turned by its angle."""
    half = rotary_dim // 2
    angle = positions[:, None].double() / 1000.0 ** (torch.arange(half).double() * 2 / rotary_dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., rotary_dim:].double()], dim=-1)


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request):
    return IMPLEMENTATIONS[request.param]


def inputs(dtype, *, heads=4, kv_heads=2, dim=8, rows=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(rows, h, dim, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads))
    key_cache, value_cache = (torch.randn(BLOCKS, BLOCK_SIZE, kv_heads, dim, generator=g).to(dtype) for _ in range(2))
    return query, key, value, key_cache, value_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_against_float64(store, dtype, heads, kv_heads, rotary_dim):
    query, key, value, key_cache, value_cache = inputs(dtype, heads=heads, kv_heads=kv_heads)
    positions = torch.tensor([0, 1, 31, 4, 4, 17])
    slots = torch.tensor([4, -1, 19, 11, 12, -1])
    wanted_keys, wanted_values = key_cache.double(), value_cache.double()
    turned = rotated64(key, positions, rotary_dim)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted_keys[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = turned[row]
            wanted_values[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[row].double()
    before = query.clone(), key.clone(), value.clone()
    got = store(query, key, value, table(32, rotary_dim), positions, slots, key_cache, value_cache)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), rotated64(query, positions, rotary_dim), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(key_cache.double(), wanted_keys, rtol=tolerance, atol=tolerance)
    assert torch.equal(value_cache.double(), wanted_values)  # values are only copied
    assert got.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip((query, key, value), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_may_not_write_leave_the_cache_as_it_was(store, dtype):
    query, key, value, key_cache, value_cache = inputs(dtype)
    before = key_cache.clone(), value_cache.clone()
    slots = torch.full((6,), -1)
    store(query, key, value, table(32, 8), torch.zeros(6, dtype=torch.int64), slots, key_cache, value_cache)
    assert torch.equal(key_cache, before[0])
    assert torch.equal(value_cache, before[1])


def test_the_two_give_the_same_bits():
    results = []
    for store in IMPLEMENTATIONS.values():
        query, key, value, key_cache, value_cache = inputs(torch.bfloat16, seed=3)
        positions, slots = torch.tensor([0, 9, 31, 4, 4, 17]), torch.tensor([4, -1, 19, 11, 12, -1])
        out = store(query, key, value, table(32, 8), positions, slots, key_cache, value_cache)
        results.append((out, key_cache, value_cache))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_caches_that_are_views_of_one_packed_tensor(store):
    """[num_blocks, num_kv_heads, block_size, 2 * head_dim], as engines have it, gives the same."""
    query, key, value, key_cache, value_cache = inputs(torch.bfloat16, seed=3)
    packed = torch.cat([key_cache, value_cache], dim=-1).transpose(1, 2).contiguous()
    views = packed.transpose(1, 2).split(key_cache.shape[-1], dim=-1)
    positions, slots = torch.tensor([0, 9, 31, 4, 4, 17]), torch.tensor([4, -1, 19, 11, 12, -1])
    out = store(query, key, value, table(32, 8), positions, slots, *views)
    assert torch.equal(out, store(query, key, value, table(32, 8), positions, slots, key_cache, value_cache))
    assert torch.equal(views[0], key_cache)
    assert torch.equal(views[1], value_cache)


def test_without_rotation_the_query_comes_back_as_a_copy(store):
    query, key, value, key_cache, value_cache = inputs(torch.float32)
    slots = torch.arange(4, 10)
    got = store(query, key, value, None, slots, slots, key_cache, value_cache)
    assert torch.equal(got, query)
    assert got.data_ptr() != query.data_ptr()
    assert torch.equal(key_cache.view(-1, 2, 8)[4:10], key)


def test_a_cache_may_have_another_dtype_than_the_rows(store):
    query, key, value, *_ = inputs(torch.float32)
    key_cache, value_cache = torch.zeros(2, BLOCKS, BLOCK_SIZE, 2, 8, dtype=torch.bfloat16)
    slots = torch.arange(4, 10)
    store(query, key, value, None, slots, slots, key_cache, value_cache)
    assert torch.equal(key_cache.view(-1, 2, 8)[4:10], key.bfloat16())


def test_rotation_keeps_lengths_and_depends_on_distance_only(store):
    """What rotary embeddings are for: q . k is a function of the difference of positions."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 8, generator=g), torch.randn(1, 1, 8, generator=g)

    def product(q_position: int, k_position: int) -> float:
        cache = torch.zeros(1, BLOCK_SIZE, 1, 8)
        slot = torch.tensor([1])
        q_turned = store(q, k, k, table(32, 8), torch.tensor([q_position]), slot, cache, cache.clone())
        assert math.isclose(float(q_turned.norm()), float(q.norm()), rel_tol=1e-5)
        store(q, k, k, table(32, 8), torch.tensor([k_position]), slot, cache, cache.clone())
        return float((q_turned[0, 0] * cache[0, 1, 0]).sum())

    assert product(9, 4) == pytest.approx(product(29, 24), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)

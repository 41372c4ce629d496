"""Paged attention in all its ways, against a float64 loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import attention64, make

from specgraph import ops


def on_host(query, key_cache, value_cache, table, query_lens, seq_lens, scale, causal):
    """The host implementation of the op with device lengths."""
    return ops.paged_attention(
        query,
        key_cache,
        value_cache,
        table,
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        query_len=max(query_lens),
        scale=scale,
        causal=causal,
    )


def dense(query, key_cache, value_cache, table, query_lens, seq_lens, scale, causal):
    """The capturable reference."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return ops.paged_attention.reference(
        query, key_cache, value_cache, table, lengths, starts, query_len=max(query_lens), scale=scale, causal=causal
    )


def host_lengths(query, key_cache, value_cache, table, query_lens, seq_lens, scale, causal):
    """The op with host lengths; `out` holds junk before."""
    out = torch.full_like(query, float("nan"))
    ops.paged_attention_host(
        query, key_cache, value_cache, table, query_lens, seq_lens, scale=scale, causal=causal, out=out
    )
    return out


WAYS = {"host": on_host, "dense": dense, "host lengths": host_lengths}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_against_float64(way, causal, block_size, heads, kv_heads):
    query_lens, seq_lens = [3, 1, 5, 2, 2], [7, 16, 5, 0, 33]
    tensors, blocks = make(query_lens, seq_lens, block_size=block_size, heads=heads, kv_heads=kv_heads)
    got = WAYS[way](*tensors, query_lens, seq_lens, 0.4, causal)
    query, key_cache, value_cache, _ = tensors
    wanted = attention64(query, key_cache, value_cache, blocks, query_lens, seq_lens, 0.4, causal)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[9:11], torch.zeros_like(got[9:11]))  # the request of length 0


@pytest.mark.parametrize("way", WAYS)
def test_caches_that_are_views_of_one_packed_tensor(way):
    query_lens, seq_lens = [3, 1, 5], [7, 16, 33]
    (query, key_cache, value_cache, table), _ = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2)
    packed = torch.cat([key_cache, value_cache], dim=-1).transpose(1, 2).contiguous()
    views = packed.transpose(1, 2).split(key_cache.shape[-1], dim=-1)
    got = WAYS[way](query, *views, table, query_lens, seq_lens, 0.4, True)
    assert torch.equal(got, WAYS[way](query, key_cache, value_cache, table, query_lens, seq_lens, 0.4, True))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ragged_batches(way, data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    border = data.draw(st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size]))
    pairs = data.draw(
        st.lists(
            st.integers(0, 6).flatmap(
                lambda q: st.tuples(st.just(q), st.one_of(st.just(0), st.integers(max(q, 1), max(q, 1) + 40)))
            ),
            min_size=1,
            max_size=5,
        )
    )
    pairs.append((1, max(border, 1)))
    query_lens, seq_lens = [q for q, _ in pairs], [n for _, n in pairs]
    causal = data.draw(st.booleans())
    tensors, blocks = make(
        query_lens, seq_lens, block_size=block_size, heads=4, kv_heads=2, seed=data.draw(st.integers(0, 99))
    )
    got = WAYS[way](*tensors, query_lens, seq_lens, 0.3, causal)
    query, key_cache, value_cache, _ = tensors
    wanted = attention64(query, key_cache, value_cache, blocks, query_lens, seq_lens, 0.3, causal)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_device_and_host_lengths_give_the_same_bits(dtype, query_len, block_size):
    seq_lens = [query_len, 16, 0, 15, 17, 33]
    query_lens = [query_len] * 6
    tensors, _ = make(query_lens, seq_lens, block_size=block_size, heads=4, kv_heads=2, dtype=dtype, seed=5)
    device = on_host(*tensors, query_lens, seq_lens, 0.35, True)
    host = host_lengths(*tensors, query_lens, seq_lens, 0.35, True)
    assert torch.equal(device.view(torch.uint8), host.view(torch.uint8))
    assert device.dtype == dtype


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_accumulated_in_float32(way):
    """Against the float64 loop over the same bfloat16 inputs, only the last rounding differs.

    The reference is torch's fused attention in bfloat16, which also rounds each weight (at most 1) once.
    """
    query_lens, seq_lens = [2, 2], [60, 31]
    tensors, blocks = make(query_lens, seq_lens, block_size=16, heads=4, kv_heads=2, dtype=torch.bfloat16)
    got = WAYS[way](*tensors, query_lens, seq_lens, 0.35, True)
    query, key_cache, value_cache, _ = tensors
    wanted = attention64(query, key_cache, value_cache, blocks, query_lens, seq_lens, 0.35, True)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=2**-9 if way == "dense" else 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_the_same_alone_and_in_a_batch(way):
    """Bit for bit, whatever its neighbours and however wide the tables are, on the host implementations."""
    query_lens, seq_lens = [3, 3, 3], [9, 30, 17]
    tensors, _ = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2, seed=2)
    query, key_cache, value_cache, table = tensors
    together = WAYS[way](*tensors, query_lens, seq_lens, 0.35, True)
    alone = WAYS[way](query[3:6], key_cache, value_cache, table[1:2], [3], [30], 0.35, True)
    if way == "dense":
        torch.testing.assert_close(together[3:6], alone)
    else:
        assert torch.equal(together[3:6], alone)


def test_the_op_that_does_all_three_is_the_two_ops():
    query_lens, seq_lens = [2, 2], [10, 6]
    (query, key_cache, value_cache, table), _ = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2)
    g = torch.Generator().manual_seed(4)
    key, value = torch.randn(2, 4, 2, 8, generator=g)
    rotary = torch.randn(32, 8, generator=g)
    positions = torch.tensor([8, 9, 4, 5])
    slots = torch.stack([table[r // 2, p // 4] * 4 + p % 4 for r, p in enumerate(positions.tolist())]).long()
    starts, lengths = torch.tensor([0, 2, 4]).int(), torch.tensor(seq_lens).int()
    caches = key_cache.clone(), value_cache.clone()
    turned = ops.rotate_and_store(query, key, value, rotary, positions, slots, *caches)
    wanted = ops.paged_attention(turned, *caches, table, lengths, starts, query_len=2, scale=0.35)
    got = ops.rotate_store_attend(
        query, key, value, rotary, positions, slots, key_cache, value_cache, table, lengths, starts,
        query_len=2, scale=0.35,
    )  # fmt: skip
    assert torch.equal(got, wanted)
    assert torch.equal(key_cache, caches[0])
    assert torch.equal(value_cache[1:].nan_to_num(), caches[1][1:].nan_to_num())


def test_the_reference_in_parts_gives_what_it_gives_at_once(monkeypatch):
    """However few requests it may gather at a time, uniform or ragged."""
    query_lens, seq_lens = [3, 3, 3, 3], [9, 0, 30, 17]
    tensors, blocks = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2, seed=2)
    query, *rest = tensors
    wanted = attention64(query, *rest[:2], blocks, query_lens, seq_lens, 0.35, True)
    torch.testing.assert_close(dense(*tensors, query_lens, seq_lens, 0.35, True).double(), wanted, rtol=1e-5, atol=1e-5)
    monkeypatch.setitem(ops.paged_attention.reference.__globals__, "GATHER_BYTES", 1)
    for skipped, lens in ((0, query_lens), (1, [2, 3, 3, 3])):
        got = dense(query[skipped:], *rest, lens, seq_lens, 0.35, True)
        torch.testing.assert_close(got.double(), wanted[skipped:], rtol=1e-5, atol=1e-5)

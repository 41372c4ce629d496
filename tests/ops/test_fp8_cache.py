"""KV caches in FP8: what is stored, against rounding by hand, and attention against float64 over the stored values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import attention64, make

from specgraph import ops

FP8 = torch.float8_e4m3fn
EVERY = torch.arange(256, dtype=torch.uint8).view(FP8).double()
FINITE = EVERY[~EVERY.isnan()].unique()


def stored(value: float) -> float:
    """The nearest number of e4m3, the one with an even last bit of two, and the largest for what is beyond."""
    distance = (FINITE - value).abs()
    near = FINITE[distance == distance.min()].tolist()
    even = [x for x in near if not torch.tensor(x).to(FP8).view(torch.uint8).item() & 1]
    return (even or near)[0]


@given(
    numbers=st.lists(st.floats(-2000, 2000, width=32), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    on_host=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_is_stored(numbers, dtype, on_host):
    rows = torch.tensor(numbers, dtype=dtype).view(2, 1, 2)
    caches = [torch.zeros(3, 4, 1, 2).to(FP8) for _ in range(2)]
    op = ops.rotate_and_store if on_host else ops.rotate_and_store.reference
    op(rows, rows, -rows, None, torch.arange(2), torch.tensor([5, -1]), *caches)
    for cache, sign in zip(caches, (1, -1), strict=True):
        seen = cache.double().view(-1, 2)
        assert seen[5].tolist() == [stored(sign * float(x)) for x in rows[0, 0]]
        assert not seen[torch.arange(12) != 5].any()


def attend(way, query, cache, table, query_lens, seq_lens):
    lengths, starts = torch.tensor(seq_lens, dtype=torch.int32), torch.tensor([0, *query_lens]).cumsum(0).int()
    how = {"query_len": max(query_lens), "scale": 0.4}
    if way == "host":
        return ops.paged_attention(query, *cache, table, lengths, starts, **how)
    if way == "reference":
        return ops.paged_attention.reference(query, *cache, table, lengths, starts, **how)
    if way == "windowed":
        return ops.windowed_attention(query, *cache, table, lengths, starts, None, **how, window=6)
    if way == "windowed, reference":
        return ops.windowed_attention.reference(query, *cache, table, lengths, starts, None, **how, window=6)
    out = torch.zeros_like(query)
    ops.paged_attention_host(query, *cache, table, query_lens, seq_lens, scale=0.4, out=out)
    return out


@pytest.mark.parametrize("way", ["host", "reference", "host lengths", "windowed", "windowed, reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(way, dtype):
    query_lens, seq_lens = [2, 2, 2], [7, 33, 2]
    (query, key, value, table), blocks = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2)
    query, cache = query.to(dtype), [key.clamp(-448, 448).to(FP8), value.to(FP8)]
    got = attend(way, query, cache, table, query_lens, seq_lens)
    assert got.dtype == dtype
    window = 6 if way.startswith("windowed") else 0
    wide = [c.double() for c in cache]
    wanted = attention64(query, *wide, blocks, query_lens, seq_lens, 0.4, True, window)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_rows_of_a_tree_move():
    cache = [torch.randn(3, 4, 1, 2).to(FP8) for _ in range(2)]
    before = [c.double().view(-1, 2) for c in cache]
    ops.move_kv(*cache, torch.tensor([7, 0, 9]), torch.tensor([5, 0, 6]))
    for now, then in zip(cache, before, strict=True):
        then[[5, 6]] = then[[7, 9]]
        assert torch.equal(now.double().view(-1, 2), then)

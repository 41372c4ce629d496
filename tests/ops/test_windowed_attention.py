"""Attention over a sliding window and with sinks, in all its ways, against a float64 loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import attention64, make

from specgraph import ops


def by_device(function):
    def run(query, key_cache, value_cache, table, query_lens, seq_lens, sinks, scale, window):
        starts, lengths = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(seq_lens, dtype=torch.int32)
        return function(
            query, key_cache, value_cache, table, lengths, starts, sinks,
            query_len=max(query_lens), scale=scale, window=window,
        )  # fmt: skip

    return run


def by_host(query, key_cache, value_cache, table, query_lens, seq_lens, sinks, scale, window):
    out = torch.full_like(query, float("nan"))
    ops.windowed_attention_host(
        query, key_cache, value_cache, table, query_lens, seq_lens, sinks, scale=scale, window=window, out=out
    )
    return out


WAYS = {
    "host": by_device(ops.windowed_attention),
    "reference": by_device(ops.windowed_attention.reference),
    "host lengths": by_host,
}
SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0])


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_against_float64(way, data):
    """Ragged and uniform batches, windows from one key to more than all, with and without sinks; junk all around."""
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    window = data.draw(st.sampled_from([0, 1, 2, 5, block_size, block_size + 1, 100]))
    counts = st.one_of(st.just([data.draw(st.integers(1, 4))] * 3), st.lists(st.integers(1, 6), min_size=1, max_size=5))
    query_lens = data.draw(counts)
    seq_lens = [data.draw(st.one_of(st.just(0), st.integers(n, n + 40))) for n in query_lens]
    seq_lens[0] = max(seq_lens[0], query_lens[0])  # one that is not empty, so that there is a cache
    sinks = data.draw(st.sampled_from([None, SINKS]))
    seed = data.draw(st.integers(0, 99))
    tensors, blocks = make(query_lens, seq_lens, block_size=block_size, heads=4, kv_heads=2, seed=seed)
    got = WAYS[way](*tensors, query_lens, seq_lens, sinks, 0.3, window)
    query, key_cache, value_cache, _ = tensors
    wanted = attention64(
        query,
        key_cache,
        value_cache,
        blocks,
        query_lens,
        seq_lens,
        0.3,
        True,
        window,
        None if sinks is None else sinks.double(),
    )
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_and_host_lengths_give_the_same_bits(dtype):
    query_lens, seq_lens = [3] * 4, [3, 0, 16, 33]
    tensors, _ = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2, dtype=dtype, seed=5)
    device, host = (WAYS[way](*tensors, query_lens, seq_lens, SINKS, 0.35, 6) for way in ("host", "host lengths"))
    assert torch.equal(device, host)
    assert device.dtype == dtype


def test_a_window_reads_no_block_before_it():
    """However long the context: NaN where no row may look stays out, also of the gathered part."""
    query_lens, seq_lens = [2], [64]
    (query, key_cache, value_cache, table), blocks = make(query_lens, seq_lens, block_size=4, heads=4, kv_heads=2)
    clean = [way(query, key_cache, value_cache, table, query_lens, seq_lens, None, 0.3, 6) for way in WAYS.values()]
    for block in blocks[0][:14]:  # positions 0 to 55; the first row sees from 57 on
        key_cache[block] = value_cache[block] = float("nan")
    after = [way(query, key_cache, value_cache, table, query_lens, seq_lens, None, 0.3, 6) for way in WAYS.values()]
    assert all(torch.equal(a, b) for a, b in zip(clean, after, strict=True))

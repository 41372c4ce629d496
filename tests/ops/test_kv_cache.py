"""Writes to the KV cache beyond the op table: FP8 and other dtypes, and calls that give equal bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_conformance.attention_rows import Rows
from specgraph_run.decoder.ops import move_kv

from specgraph import ops
from specgraph.ops import KVCache, NewRows

FP8 = torch.float8_e4m3fn
EVERY = torch.arange(256, dtype=torch.uint8).view(FP8).double()
FINITE = EVERY[~EVERY.isnan()].unique()
STORES = {"reference": ops.rotate_and_store.reference, "host": ops.rotate_and_store}


def nearest(value: float) -> float:
    """The nearest number of e4m3, the one with an even last bit of two, and the largest for what is beyond."""
    distance = (FINITE - value).abs()
    near = FINITE[distance == distance.min()].tolist()
    even = [x for x in near if not torch.tensor(x).to(FP8).view(torch.uint8).item() & 1]
    return (even or near)[0]


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@given(
    numbers=st.lists(st.floats(-2000, 2000, width=32), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_what_is_stored_in_fp8(store, numbers, dtype):
    rows = torch.tensor(numbers, dtype=dtype).view(2, 1, 2)
    cache = KVCache(*(torch.zeros(3, 4, 1, 2).to(FP8) for _ in range(2)))
    store(rows, NewRows(rows, -rows, None, torch.arange(2), torch.tensor([5, -1])), cache)
    for part, sign in zip(cache, (1, -1), strict=True):
        seen = part.double().view(-1, 2)
        assert seen[5].tolist() == [nearest(sign * float(x)) for x in rows[0, 0]]
        assert not seen[torch.arange(12) != 5].any()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("rotated", [0, 4, 8])
def test_reference_and_host_give_the_same_bits(strided, rotated):
    results = []
    for store in STORES.values():
        g = torch.Generator().manual_seed(3)
        rows = Rows(g, [2, 1, 3], [10, 0, 17], dim=8, dtype=torch.bfloat16, rotated=rotated, strided_cache=strided)
        results.append((store(rows.query, rows.new, rows.cache), *rows.cache))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_without_rotation_the_query_comes_back_as_a_copy_and_a_cache_may_have_another_dtype(store):
    rows = Rows(torch.Generator().manual_seed(0), [6], [16], dim=8, rotated=0, cache_dtype=torch.bfloat16)
    got = store(rows.query, rows.new, rows.cache)
    assert torch.equal(got, rows.query)
    assert got.data_ptr() != rows.query.data_ptr()
    assert torch.equal(rows.cache.key.flatten(0, 1)[rows.new.slot_mapping], rows.new.key.bfloat16())


def test_rows_of_a_tree_move_in_fp8():
    cache = [torch.randn(3, 4, 1, 2).to(FP8) for _ in range(2)]
    before = [c.double().view(-1, 2) for c in cache]
    move_kv(*cache, torch.tensor([7, 0, 9]), torch.tensor([5, 0, 6]))
    for now, then in zip(cache, before, strict=True):
        then[[5, 6]] = then[[7, 9]]
        assert torch.equal(now.double().view(-1, 2), then)

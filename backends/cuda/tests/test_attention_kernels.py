"""Triton attention against its plain torch reference in float64, at sizes where blocks and splits end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_float64 import close, make, triton_ops  # noqa: F401
from specgraph_conformance.attention_rows import Rows
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph import ops
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows

CASES = [
    # block size, rows per request, lengths, causal, heads, kv heads, head dim
    (16, 1, [0, 1, 15, 16, 17, 63, 64, 65, 1000], True, 32, 8, 128),
    (64, 1, [5, 64, 0, 129, 2048], True, 8, 8, 64),
    (16, 6, [6, 0, 16, 17, 700, 7], True, 32, 8, 128),
    (64, 6, [64, 65, 0, 9], True, 12, 2, 128),
    (16, 16, [16, 40, 0, 300], False, 32, 8, 128),
    (16, 1, [3, 33], True, 6, 2, 32),
    (16, 1, [3, 33], True, 4, 1, 256),
    (16, 40, [40, 100], True, 32, 8, 128),
    (16, 2, [2, 37], True, 6, 2, 16),
    (256, 1, [1, 255, 256, 257, 0, 1025], True, 8, 2, 64),
    (48, 6, [6, 47, 100], True, 8, 2, 64),
    (32, 6, [6, 0, 33, 300], True, 16, 1, 96),
    (128, 1, [1, 128, 0, 700], True, 32, 2, 96),
    (16, 1, [5, 20], True, 16, 16, 80),
    (16, 3, [5, 200], False, 12, 4, 256),
    (64, 1, [40000, 3], True, 8, 2, 128),
]


def wide(record: Any) -> Any:
    """The record with floating tensors in float64."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, record)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"b{c[0]}q{c[1]}c{c[3]:d}h{c[4]}d{c[6]}")
@pytest.mark.parametrize("packed_caches", [False, True])
def test_attention(case: tuple, dtype: torch.dtype, packed_caches: bool) -> None:
    block, count, lengths, causal, heads, kv_heads, dim = case
    made = Rows(
        torch.Generator().manual_seed(0), [count] * len(lengths), lengths, (heads, kv_heads), dim, block, dtype,
        Mask(causal), strided=True, strided_cache=packed_caches,
    )  # fmt: skip
    given = made.query, made.cache, made.table, made.lengths, made.mask, made.new
    query, cache, *placed, new = tree_map_only(Tensor, lambda t: t.to("cuda"), given)
    expected = KVCache(*(part.clone() for part in cache))
    turned = ops.rotate_and_store.reference(query, new, expected)
    want = ops.paged_attention.reference(turned.double(), wide(expected), *placed, scale=made.factor)
    got = ops.paged_attention(query, cache, *placed, new, scale=made.factor)
    close(got, want)
    close(ops.paged_attention(turned, cache, *placed, scale=made.factor), want)
    close(cache.key, expected.key)
    assert torch.equal(cache.value, expected.value)
    cells = [int(slot) for slot in made.new.slot_mapping if slot >= 0]
    others = torch.ones(cache.key.shape[:2], dtype=torch.bool, device="cuda")
    others.view(-1)[cells] = False
    assert torch.equal(cache.key[others], expected.key[others])
    assert bool((got.unflatten(0, (len(lengths), count))[torch.tensor(lengths) == 0] == 0).all())


def lengths_of(*keys: int) -> DeviceLengths:
    """One row per request."""
    starts = torch.arange(len(keys) + 1, dtype=torch.int32, device="cuda")
    return DeviceLengths(torch.tensor(keys, dtype=torch.int32, device="cuda"), starts, 1)


def test_a_row_without_a_slot_reads_the_cache_as_it_is() -> None:
    cache = KVCache(make(4, 16, 8, 128), make(4, 16, 8, 128))
    table, positions = torch.tensor([[1, 2]], dtype=torch.int32).cuda(), torch.tensor([19]).cuda()
    query, new = make(1, 32, 128), NewRows(make(1, 8, 128), make(1, 8, 128), None, positions, positions * 0 - 1)
    before = cache.key.clone()
    got = ops.paged_attention(query, cache, table, lengths_of(20), Mask(), new, scale=0.1)
    close(got, ops.paged_attention.reference(query.double(), wide(cache), table, lengths_of(20), Mask(), scale=0.1))
    assert torch.equal(cache.key, before)


def test_caches_that_the_kernels_cannot_take_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = KVCache(make(3, 16, 2, 128)[..., ::2], make(3, 16, 2, 128)[..., ::2])
    table, query = torch.tensor([[1, 2]], dtype=torch.int32).cuda(), make(1, 4, 64)
    for _ in range(2):
        got = ops.paged_attention(query, cache, table, lengths_of(20), Mask(), scale=0.1)
    close(got, ops.paged_attention.reference(query.double(), wide(cache), table, lengths_of(20), Mask(), scale=0.1))
    assert sum("last stride of the KV caches is 2" in record.message for record in caplog.records) == 1

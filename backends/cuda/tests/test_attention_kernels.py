"""Triton attention against its plain torch reference in float64, at sizes where blocks and splits end."""

from __future__ import annotations

import pytest
import torch
from against_float64 import close, make, triton_ops  # noqa: F401

from specgraph import ops
from specgraph.ops.kv_cache import rotate

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"b{c[0]}q{c[1]}c{c[3]:d}h{c[4]}d{c[6]}")
@pytest.mark.parametrize("packed_caches", [False, True])
def test_attention(case: tuple, dtype: torch.dtype, packed_caches: bool) -> None:
    block, rows, lengths, causal, heads, kv_heads, dim = case
    requests, width = len(lengths), -(-max(lengths) // block) + 3
    keys = make(requests * width + 1, block, kv_heads, dim, dtype=dtype)
    values = make(*keys.shape, dtype=dtype)
    if packed_caches:  # as engines have them: one tensor [blocks, kv_heads, block, 2 * dim]
        whole = torch.cat([keys, values], dim=-1).transpose(1, 2).contiguous()
        keys, values = whole.transpose(1, 2).split(dim, dim=-1)
    table = (torch.randperm(requests * width, device="cuda") + 1).view(requests, width).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device="cuda")
    packed = make(requests * rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    query, key, value = (t.view(requests * rows, -1, dim) for t in packed.split(sizes, dim=-1))
    scale = dim**-0.5

    how = {"query_len": rows, "scale": scale, "causal": causal}
    got = ops.paged_attention(query, keys, values, table, seq_lens, starts, **how)
    attend = ops.paged_attention.reference
    want = attend(query.double(), keys.double(), values.double(), table, seq_lens, starts, **how)
    close(got, want)
    assert bool((got.view(requests, rows, heads, dim)[seq_lens == 0] == 0).all())

    rotary = torch.randn(max(lengths) + 1, dim, device="cuda")
    position = (seq_lens.long()[:, None] - rows + torch.arange(rows, device="cuda")).clamp(min=0).flatten()
    request = torch.arange(requests, device="cuda").repeat_interleave(rows)
    slots = table[request, position // block].long() * block + position % block
    slots = torch.where(seq_lens.long()[request] > 0, slots, -1)
    wide = [t.double() for t in (query, key, value, keys, values)]
    turned = [rotate(t, rotary.double(), position) for t in wide[:2]]
    live = slots >= 0
    place = slots[live] // block, slots[live] % block
    wide[3][place], wide[4][place] = turned[1][live].to(dtype).double(), wide[2][live]
    before = keys.clone(), values.clone()
    got = ops.rotate_store_attend(
        query, key, value, rotary, position, slots, keys, values, table, seq_lens, starts, **how
    )
    want = attend(turned[0].to(dtype).double(), wide[3], wide[4], table, seq_lens, starts, **how)
    close(got, want)
    close(keys, wide[3])
    assert torch.equal(values, wide[4].to(dtype))
    untouched = torch.ones(keys.shape[0] * block, dtype=torch.bool, device="cuda")
    untouched[slots[live]] = False
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now.flatten(0, 1)[untouched], then.flatten(0, 1)[untouched])


def test_a_row_without_a_slot_reads_the_cache_as_it_is() -> None:
    keys, values = make(4, 16, 8, 128), make(4, 16, 8, 128)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device="cuda")
    seq_lens, starts = torch.tensor([20], dtype=torch.int32).cuda(), torch.tensor([0, 1], dtype=torch.int32).cuda()
    query, key, value = make(1, 32, 128), make(1, 8, 128), make(1, 8, 128)
    before = keys.clone()
    got = ops.rotate_store_attend(
        query, key, value, None, torch.tensor([19]).cuda(), torch.tensor([-1]).cuda(), keys, values, table, seq_lens,
        starts, query_len=1, scale=0.1,
    )  # fmt: skip
    wide = query.double(), keys.double(), values.double()
    close(got, ops.paged_attention.reference(*wide, table, seq_lens, starts, query_len=1, scale=0.1))
    assert torch.equal(keys, before)


def test_caches_that_the_kernels_cannot_take_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    keys, values = make(3, 16, 2, 128)[..., ::2], make(3, 16, 2, 128)[..., ::2]
    table, starts = torch.tensor([[1, 2]], dtype=torch.int32).cuda(), torch.tensor([0, 1], dtype=torch.int32).cuda()
    seq_lens, query = torch.tensor([20], dtype=torch.int32).cuda(), make(1, 4, 64)
    for _ in range(2):
        got = ops.paged_attention(query, keys, values, table, seq_lens, starts, query_len=1, scale=0.1)
    wide = query.double(), keys.double(), values.double()
    close(got, ops.paged_attention.reference(*wide, table, seq_lens, starts, query_len=1, scale=0.1))
    assert sum("last stride of the KV caches is 2" in record.message for record in caplog.records) == 1

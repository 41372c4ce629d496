"""Attention with tiles of any cut against the plain torch reference in float64. What no row may read holds NaN.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device
from torch import Tensor

from specgraph.ops.triton import attention_ops
from specgraph.ops.triton.implement import TritonOps
from specgraph.ops.triton.launch import AttentionTile, LaunchOptions

__all__ = ["device"]  # the fixture
BLOCK, HEADS, KV_HEADS, WIDTH = 16, 6, 2, 9
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
LENGTHS = {1: [1, 0, 17, 129, 33, 32, 34, 65], 6: [6, 0, 17, 130, 33], 16: [16, 0, 75]}
TILES = [
    AttentionTile(64, 16, 1),
    AttentionTile(64, 32, 2, stages=5),
    AttentionTile(64, 16, 4, stages=7, span=32),
    AttentionTile(16, 16, 8, span=64),  # more than one tile of 16 rows
    AttentionTile(64, 16, 8, span=16),
]


def close(got: Tensor, want: Tensor) -> None:
    error = float((got.cpu().double() - want).norm() / want.norm())
    assert error < (6e-3 if got.dtype == torch.bfloat16 else 1e-5), error  # NaN fails too


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.keys}x{tile.splits}from{tile.span}")
@pytest.mark.parametrize("rows", LENGTHS)
def test_every_cut_of_a_context(tile: AttentionTile, rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    seq_lens, dim = torch.tensor(LENGTHS[rows]).int(), 32
    requests = len(seq_lens)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    cache = [make(requests * WIDTH + 1, BLOCK, KV_HEADS, dim) for _ in range(2)]
    table = (torch.randperm(requests * WIDTH, generator=g) + 1).view(requests, WIDTH).int()
    cells = table.long().repeat_interleave(BLOCK, 1) * BLOCK + torch.arange(WIDTH * BLOCK) % BLOCK
    past = torch.arange(WIDTH * BLOCK) >= seq_lens[:, None]
    for part in cache:
        part.view(-1, KV_HEADS, dim)[cells[past]] = float("nan")
    starts = torch.arange(0, requests * rows + 1, rows).int()
    query, key, value = make(requests * rows, (HEADS + 2 * KV_HEADS), dim).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    options = {"query_len": rows, "scale": dim**-0.5, "causal": rows < 16}
    ops = TritonOps(LaunchOptions(attention=lambda shape: tile))

    lengths = table, seq_lens, starts
    there = [t.to(DEVICE) for t in (*cache, *lengths)]
    got = ops.paged_attention(query.contiguous().to(DEVICE), *there, **options)
    wide = [part.double() for part in cache]
    close(got, ops.paged_attention.reference(query.double(), *wide, *lengths, **options))
    if rows > 1:
        return
    position = (seq_lens - 1).long().clamp(min=0)
    slots = cells.gather(1, position[:, None])[:, 0].where(seq_lens > 0, -1)
    slots[3] = -1  # its key is in the cache already
    for part in (*there[:2], *wide):
        part.view(-1, KV_HEADS, dim)[slots[slots >= 0].to(part.device)] = float("nan")
    rotary = torch.randn(WIDTH * BLOCK, dim, generator=g)
    given = [t.to(DEVICE) for t in (query, key, value, rotary, position, slots)]
    got = ops.rotate_store_attend(*given, *there, **options)
    new = query.double(), key.double(), value.double(), rotary.double(), position, slots
    close(got, ops.rotate_store_attend.reference(*new, *wide, *lengths, **options))
    for part, expected in zip(there[:2], wide, strict=True):
        torch.testing.assert_close(part.cpu().double(), expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="compares bits of two kernels, which a compiler may round differently")
@pytest.mark.parametrize("rows", [1, 6])
def test_short_contexts_are_not_cut(rows: int) -> None:
    """Of less than two spans: the bits of a tile without splits, in one batch with contexts that are cut."""
    g, dim, lengths = torch.Generator().manual_seed(rows), 32, torch.tensor([63, 6, 33, 64, 130]).int()

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE)

    blocks = torch.arange(1, 5 * WIDTH + 1).view(5, WIDTH).int().to(DEVICE)
    cache, starts = [make(5 * WIDTH + 1, BLOCK, KV_HEADS, dim) for _ in range(2)], torch.arange(0, 5 * rows + 1, rows)
    given = make(5 * rows, HEADS, dim), *cache, blocks, lengths.to(DEVICE), starts.int().to(DEVICE)
    cut, whole = (
        TritonOps(LaunchOptions(attention=lambda shape, tile=tile: tile)).paged_attention(
            *given, query_len=rows, scale=dim**-0.5
        )
        for tile in (AttentionTile(32, 16, 4, span=32), AttentionTile(32, 16, 1))
    )
    short = 3 * rows
    assert torch.equal(cut[:short], whole[:short])
    assert not torch.equal(cut[short:], whole[short:])  # cut, and added in another order


@pytest.mark.skipif(not INTERPRETED, reason="compares bits of two kernels, which a compiler may round differently")
@pytest.mark.parametrize("rows", [1, 6])
def test_the_order_in_which_splits_start_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contexts that are equal, inert, cut and not cut."""
    g, dim, lengths = torch.Generator().manual_seed(rows), 32, torch.tensor([63, 0, 130, 33, 64, 130, 97]).int()
    requests = len(lengths)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(DTYPES[-1]).to(DEVICE)

    blocks = torch.arange(1, requests * WIDTH + 1).view(requests, WIDTH).int().to(DEVICE)
    cache = [make(requests * WIDTH + 1, BLOCK, KV_HEADS, dim) for _ in range(2)]
    starts = torch.arange(0, requests * rows + 1, rows).int().to(DEVICE)
    query, outs = make(requests * rows, HEADS, dim), list[Tensor]()
    ops = TritonOps(LaunchOptions(attention=lambda shape: AttentionTile(16, 16, 4, span=32)))
    for most in (0, 32):
        monkeypatch.setattr(attention_ops, "MOST_LISTED", most)
        outs.append(
            ops.paged_attention(
                query, *cache, blocks, lengths.to(DEVICE), starts, query_len=rows, scale=dim**-0.5, causal=rows < 6
            )
        )
    assert torch.equal(*outs)
    assert outs[0][:rows].any()

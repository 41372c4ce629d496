"""Attention with tiles of any cut against the plain torch reference in float64. What no row may read holds NaN.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device
from launched import Launched
from specgraph_conformance.attention_rows import Rows
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph.kernels import attention
from specgraph.kernels.launch import AttentionTile, LaunchOptions
from specgraph.ops import Mask

__all__ = ["device"]  # the fixture
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
LENGTHS = {1: [1, 0, 17, 129, 33, 32, 34, 65], 6: [6, 0, 17, 130, 33], 16: [16, 0, 75]}
TILES = [
    AttentionTile(64, 16, 1),
    AttentionTile(64, 32, 2, stages=5),
    AttentionTile(64, 16, 4, stages=7, span=32),
    AttentionTile(16, 16, 8, span=64),  # more than one tile of 16 rows
    AttentionTile(64, 16, 8, span=16),
]
BITS = pytest.mark.skipif(
    not INTERPRETED, reason="compares bits of two kernels, which a compiler may round differently"
)


def rows_of(count: int, lengths: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> Rows:
    """Requests of `count` rows each, in host memory."""
    g = torch.Generator().manual_seed(count)
    mask = Mask(causal=count < 16)
    return Rows(
        g, [count] * len(lengths), lengths, (6, 2), 32, 16, dtype, mask, poison=True, poison_tail=True, **options
    )


def run_tile(tile: AttentionTile) -> Any:
    """Runs attention with that tile: see `specgraph_conformance.op_table.Run`."""
    ops = Launched(LaunchOptions(attention=lambda shape: tile))

    def run(op: Any, *given: Any, scale: float, written: Any = ()) -> Tensor:
        there = tree_map_only(Tensor, lambda t: t.to(DEVICE, copy=True), given)
        out = ops.paged_attention(*there, scale=scale)
        for here, now in zip(given[1], there[1], strict=True):
            here.copy_(now)
        return out.cpu()

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.keys}x{tile.splits}from{tile.span}")
@pytest.mark.parametrize("count", LENGTHS)
def test_every_cut_of_a_context(tile: AttentionTile, count: int, dtype: torch.dtype) -> None:
    """The kernel also stores the rows, where there is one per request; else they are stored before."""
    made = rows_of(count, LENGTHS[count], dtype, strided=True)
    if count == 1:
        for part, rows in zip(made.cache, made.stored(), strict=True):
            for slot in made.new.slot_mapping[:3]:
                part.view(-1, 2, 32)[max(int(slot), 0)] = float("nan")  # a row's own key does not travel through it
            part.view(-1, 2, 32)[made.new.slot_mapping[3]] = rows[3]  # its key is in the cache already
        made.new.slot_mapping[3] = -1
    made.check(run_tile(tile), tolerance=1e-5 if dtype == torch.float32 else 3e-2)


@BITS
@pytest.mark.parametrize("count", [1, 6])
def test_short_contexts_are_not_cut(count: int) -> None:
    """Contexts of less than two spans: the bits of a tile without splits, in one batch with contexts that are cut."""
    made = rows_of(count, [63, 6, 33, 64, 130])
    cut, whole = (
        made.run(run_tile(tile), None) for tile in (AttentionTile(32, 16, 4, span=32), AttentionTile(32, 16, 1))
    )
    short = 3 * count
    assert torch.equal(cut[:short], whole[:short])
    assert not torch.equal(cut[short:], whole[short:])  # cut, and added in another order


@BITS
@pytest.mark.parametrize("count", [1, 6])
def test_the_order_in_which_splits_start_changes_no_bit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that are equal, inert, cut and not cut."""
    made, outs = rows_of(count, [63, 0, 130, 33, 64, 130, 97]), list[Tensor]()
    for most in (0, 32):
        monkeypatch.setattr(attention, "MOST_LISTED", most)
        outs.append(made.run(run_tile(AttentionTile(16, 16, 4, span=32)), None))
    assert torch.equal(*outs)
    assert outs[0][:count].any()

"""Attention in parts: kernels that add the results of a context's splits, or of the ranks that share a context.

A row has `dim` elements of attention. If it is one element wider, the last one is the log-sum-exp of its scores.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.kv_cache import KVCacheOps
from specgraph.kernels.launch import ceil_div, power_of_two


@triton.jit
def first_of(mask, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Return mask [N, 1] for the first HALF of HALVES columns: [N, HALVES], or the mask itself if HALF is HALVES."""
    if HALF != HALVES:
        mask = mask & (tl.arange(0, HALVES) < HALF)[None, :]
    return mask


@triton.jit
def store_sums(out, place, top, total, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the log-sum-exp of each row's scores behind its DIM elements, if rows of `out` are wider than DIM."""
    if WIDTH > DIM:
        in_base_2 = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(out + place * WIDTH + DIM, in_base_2 * 0.6931471805599453, mask=live)


@triton.jit
def combine_kernel(
    partial_out, partial_max, partial_sum, out, items, DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, ITEMS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the splits of ITEMS pairs of row and head, in order. SPLITS and DIMS >= DIM are powers of two.

    With SPAN, a pair with a first `partial_sum` of -1 is skipped: `attend_kernel` has written its output already.
    """
    if OVERLAP is not None:
        OVERLAP()
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item < items
    if SPAN:
        live = live & (tl.load(partial_sum + item.to(tl.int64) * SPLITS, mask=live, other=-1.0) >= 0)
    at = item.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    tops = tl.load(partial_max + at, mask=live[:, None], other=float("-inf"))
    top = tl.max(tops, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(tops - base[:, None])
    filled = live[:, None] & (tops > float("-inf"))
    total = tl.sum(share * tl.load(partial_sum + at, mask=filled, other=0.0), axis=1)
    dim = tl.arange(0, DIMS)
    wanted = first_of(live[:, None], DIM, DIMS)
    acc = tl.zeros((ITEMS, DIMS), tl.float32)
    for split in tl.static_range(SPLITS):
        place = item.to(tl.int64) * SPLITS + split
        weight = tl.exp2(tl.load(partial_max + place, mask=live, other=float("-inf")) - base)
        filled = wanted & (weight > 0)[:, None]  # an empty split has written no sums
        part = tl.load(partial_out + place[:, None] * DIM + dim[None, :], mask=filled, other=0.0)
        acc += weight[:, None] * part
    acc *= tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    at = out + item.to(tl.int64)[:, None] * WIDTH + dim[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=wanted)
    store_sums(out, item.to(tl.int64), top, total, live, DIM, WIDTH)


@triton.jit
def sum_parts_kernel(
    parts, out, items, heads, first_head, num_heads, of_rank, DIM: tl.constexpr, DIMS: tl.constexpr,
    RANKS: tl.constexpr, ITEMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the parts of RANKS ranks for ITEMS pairs of a row and one of `num_heads` heads.

    A rank's part has rows [heads, DIM + 1], `of_rank` elements in all.
    """
    if OVERLAP is not None:
        OVERLAP()
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    live = item < items
    dim = tl.arange(0, DIMS)
    wanted = first_of(live[:, None], DIM, DIMS)
    at = parts + ((item // num_heads).to(tl.int64) * heads + first_head + item % num_heads) * (DIM + 1)
    top = tl.full((ITEMS,), float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        top = tl.maximum(top, tl.load(at + rank * of_rank + DIM, mask=live, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((ITEMS,), tl.float32)
    acc = tl.zeros((ITEMS, DIMS), tl.float32)
    for rank in tl.static_range(RANKS):
        weight = tl.exp(tl.load(at + rank * of_rank + DIM, mask=live, other=float("-inf")) - base)
        part = tl.load((at + rank * of_rank)[:, None] + dim[None, :], mask=wanted, other=0.0)
        acc += weight[:, None] * part
        total += weight
    acc /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + item.to(tl.int64)[:, None] * DIM + dim[None, :], acc, mask=wanted)


class Partial(NamedTuple):
    """The results of all splits. `combine_kernel` adds them."""

    out: Tensor
    """float32 [T * heads, splits, dim]"""
    top: Tensor
    """float32 [T * heads, splits]: the largest score."""
    total: Tensor
    """float32 [T * heads, splits]: the sum of exp(score - top)."""


class AttentionPartOps(KVCacheOps):
    """The implementation of `specgraph.ops.sum_parts`, and the launch of `combine_kernel`."""

    __slots__ = ()

    def sum_parts(self, parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
        rows, heads, dim = parts.shape[0] // ranks, parts.shape[1], parts.shape[2] - 1
        out = torch.empty((rows, num_heads, dim), dtype=parts.dtype, device=parts.device)
        if rows:
            per_program = 4
            self.launch(
                sum_parts_kernel, (ceil_div(rows * num_heads, per_program),), parts.contiguous(), out,
                rows * num_heads, heads, first_head, num_heads, rows * heads * (dim + 1), DIM=dim,
                DIMS=power_of_two(dim), RANKS=ranks, ITEMS=per_program, num_warps=4,
            )  # fmt: skip
        return out

    def _combine(self, partial: Partial, out: Tensor, span: int) -> None:
        """Add the splits into `out`, [T, heads, dim] or [T, heads, dim + 1]."""
        count, splits, dim = partial.out.shape
        items = 4 if splits <= 16 else 1
        self.launch(
            combine_kernel, (ceil_div(count, items),),
            *partial, out, count, DIM=dim, DIMS=power_of_two(dim), SPLITS=splits, SPAN=span, ITEMS=items,
            WIDTH=out.shape[2], num_warps=4,
        )  # fmt: skip

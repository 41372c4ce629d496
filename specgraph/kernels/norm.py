"""Norms of few rows, one program per row."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, contiguous_rows, power_of_two
from specgraph.ops.linear import Norm, PairInput, normed


@triton.jit
def normed_row(x, norm, size, eps, WIDTH: tl.constexpr):
    """Return x / rms(x) * norm of one row, in float32. Without a norm, return x."""
    column = tl.arange(0, WIDTH)
    inside = column < size
    row = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        row *= tl.rsqrt(tl.sum(row * row, axis=0) / size + eps)
        row *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    return row


@triton.jit
def write_normed(x, norm, out, size, eps, WIDTH: tl.constexpr):
    """Write `normed_row` to `out` in the dtype of out."""
    row = normed_row(x, norm, size, eps, WIDTH)
    column = tl.arange(0, WIDTH)
    tl.store(out + column, row.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def norm_kernel(x, norm, out, size, stride, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute out [rows, size] = rms_norm(x)."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    write_normed(x + row * stride, norm, out + row * size, size, eps, WIDTH)


@triton.jit
def pair_kernel(
    token_ids, table, table_norm, hidden, hidden_norm, out, table_stride, width, hidden_width, hidden_stride, eps,
    WIDTH: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, width + hidden_width] = cat(norm(table[token_ids]), norm(hidden)).

    One program per row and half.
    """
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    to = out + row * (width + hidden_width)
    if tl.program_id(1) == 0:
        chosen = table + tl.load(token_ids + row) * table_stride
        write_normed(chosen, table_norm, to, width, eps, WIDTH)
    else:
        write_normed(hidden + row * hidden_stride, hidden_norm, to + width, hidden_width, eps, HIDDEN_WIDTH)


class NormOps(Launcher):
    """Launches of norms, for the classes of linears."""

    __slots__ = ()

    def _pair(self, token_ids: Tensor, hidden: Tensor, pair: PairInput) -> Tensor:
        """Return cat(rms_norm(table[token_ids]), rms_norm(hidden)), [T, E + H]."""
        table, table_norm, hidden_norm, eps = pair
        if table.stride(1) != 1:  # take the rows only: every call would copy the whole table
            token_ids, table = torch.arange(token_ids.shape[0], device=table.device), table[token_ids]
        hidden = contiguous_rows(hidden)
        rows_, width, hidden_width = hidden.shape[0], table.shape[1], hidden.shape[1]
        out = hidden.new_empty(rows_, width + hidden_width)
        if rows_:
            self.launch(
                pair_kernel, (rows_, 2),
                token_ids.contiguous(), table, table_norm, hidden, hidden_norm, out, table.stride(0), width,
                hidden_width, hidden.stride(0), eps, WIDTH=power_of_two(width),
                HIDDEN_WIDTH=power_of_two(hidden_width), num_warps=8,
            )  # fmt: skip
        return out

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return rms_norm(x), or x without a norm, with contiguous rows."""
        x = contiguous_rows(x)
        if norm is None:
            return x
        if x.shape[0] == 0 or x.dim() != 2:
            return normed(x, *norm)
        out, width = x.new_empty(x.shape), x.shape[1]
        self.launch(
            norm_kernel, (x.shape[0],),
            x, norm.weight, out, width, x.stride(0), norm.eps, WIDTH=power_of_two(width), num_warps=8
        )  # fmt: skip
        return out

# type: ignore  (what Triton compiles is not what a type checker reads)
"""Norms of few rows, one program per row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed_row(x, norm, size, eps, WIDTH: tl.constexpr):
    """x / rms(x) * norm of one row, in float32; x itself where there is no norm."""
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
    """out [rows, size] = rms_norm(x)."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    write_normed(x + row * stride, norm, out + row * size, size, eps, WIDTH)


@triton.jit
def pair_kernel(
    token_ids, table, table_norm, hidden, hidden_norm, out, table_stride, width, hidden_width, hidden_stride, eps,
    WIDTH: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, width + hidden_width] = cat(norm(table[token_ids]), norm(hidden)), one program per row and half."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    to = out + row * (width + hidden_width)
    if tl.program_id(1) == 0:
        chosen = table + tl.load(token_ids + row) * table_stride
        write_normed(chosen, table_norm, to, width, eps, WIDTH)
    else:
        write_normed(hidden + row * hidden_stride, hidden_norm, to + width, hidden_width, eps, HIDDEN_WIDTH)

"""Linears of few rows, with residual, activation or argmax in their epilogue.

With the few rows of a draft step, a linear takes the time that reading its weights takes. So its epilogue also does the
work that needs only its output, and the sums of squares for a norm before the next linear, see `linear_kernel`. Any
other norm is a kernel of its own. A linear that scaled rows inside its loop would take the operand out of the copy
pipeline. That costs more than the small kernel, during which the linear prefetches its weights. Each backend has its
measurements beside its tiles.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph import ops
from specgraph.kernels.launch import ManyRows, Tile, ceil_div, contiguous_rows, power_of_two, tile_rows
from specgraph.kernels.norm import NormOps
from specgraph.ops.linear import Norm, Weight

MAX_ROWS = 64
"""The most rows for these kernels. With more, a linear takes longer than reading its weights, and the library's matmul
is as fast. A kernel of its own dequantises an FP8 weight for that matmul."""

HALVES = (torch.bfloat16, torch.float16)
"""The dtypes of x that the kernels take."""


@triton.jit
def first_lines(weight, columns, depth, PREFETCH: tl.constexpr):
    """Return the addresses (int64) of the cache lines of weight's rows `columns`, up to input column PREFETCH."""
    lines = tl.arange(0, PREFETCH // 64) * 64
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def x_row_starts(x, weight, taken, row, rows, columns, depth, x_stride, MASKED: tl.constexpr):
    """Return the addresses [ROWS] of the rows `taken` of x. Without a mask, spare rows of the tile are in `weight`.

    Their products are not stored. With a mask the loop would have a select for each copy, and might wait for it. Other
    programs read these rows of the weight anyway. To repeat the last row of x would read one cache line many times.
    """
    start = x + taken * x_stride
    if not MASKED:
        start = tl.where(row < rows, start, weight + tl.minimum(row, columns - 1) * depth)
    return start


@triton.jit
def load_rows(at, live, MASKED: tl.constexpr):
    """Load x at the addresses `at` [ROWS, DEPTH]. With a mask, rows that are not `live` [ROWS] are zeros."""
    return tl.load(at, mask=live[:, None] if MASKED else None, other=0.0 if MASKED else None)


@triton.jit
def load_squares(squares, row, live, parts, PARTS: tl.constexpr):
    """Load squares [rows, parts] as [ROWS, PARTS]. Their sum over parts is the sum of a row's squared elements."""
    part = tl.arange(0, PARTS)
    return tl.load(
        squares + row[:, None] * parts + part[None, :], mask=live[:, None] & (part < parts)[None, :], other=0.0
    )


@triton.jit
def linear_kernel(
    x, weight, bias, residual, out, norm, scaled_out, squares_out, squares, rows, columns, depth, x_stride,
    residual_stride, parts, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out = x @ weight.T + bias + residual.

    Two linears share the work of a norm between them. With `norm`, this is the first one: scaled_out = out * norm, and
    squares_out [rows, programs] gets the sum of squares of each program's columns of out. With `squares` [rows, parts],
    this is the second one: x is the scaled_out of the first, squares its squares_out, and the kernel divides each row
    of the product by its root mean square.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x_row_starts(x, weight, row, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if squares is not None:
        square = load_squares(squares, row, live, parts, PARTS)
        if ROWS > 16:  # too many values to hold until the product is done
            square = tl.sum(square, axis=1, keep_dims=True)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        acc = tl.dot(a, tl.trans(tl.load(w_rows + k, eviction_policy="evict_first")), acc)
    if squares is not None:
        acc *= tl.rsqrt(tl.sum(square, axis=1) / depth + eps)[:, None]
    mask = live[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    if bias is not None:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    if residual is not None:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=mask)
    if norm is not None:
        total = tl.where(mask, result.to(tl.float32), 0.0)
        weighted = total * tl.load(norm + safe)[None, :].to(tl.float32)
        tl.store(scaled_out + at, weighted.to(out.dtype.element_ty), mask=mask)
        to = squares_out + row * tl.num_programs(0) + tl.program_id(0)
        tl.store(to, tl.sum(total * total, axis=1), mask=live)


@triton.jit
def add_parts_kernel(
    parts, residual, out, norm, normed, rows, columns, residual_stride, eps, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, columns] = round(sum of parts [SPLIT, rows, columns]) + residual, one program per row.

    The parts are added in float32, in order. With `norm`, also normed [rows, columns] = rms_norm(out).
    """
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    if norm is not None:  # norm is a weight: no kernel that may still run writes it
        scale = tl.load(norm + column, mask=inside, other=0.0)
    if OVERLAP is not None:
        OVERLAP(START=False)
    if residual is not None:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(parts + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + (part * rows + row) * columns + column, mask=inside, other=0.0)
    rounded = total.to(out.dtype.element_ty)
    if residual is not None:
        rounded = (rounded.to(tl.float32) + more).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, rounded, mask=inside)
    if norm is not None:
        wide = rounded.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
        wide *= scale.to(tl.float32)
        tl.store(normed + row * columns + column, wide.to(out.dtype.element_ty), mask=inside)


class LinearOps(NormOps):
    """The implementation of `specgraph.ops.norm_linear` for weights in the dtype of x."""

    __slots__ = ()

    def norm_linear(self, x: Tensor, norm: Norm | None, weight: Weight, residual: Tensor | None = None) -> Tensor:
        x = self._normed(x, norm)
        matrix, bias, _ = weight
        few = self.options.few_rows
        if few is not None and bias is None and (out := few.linear(x, matrix, residual)) is not None:
            return out
        own = self._own(x, bias)
        if own is not None and (parts := own.parts(x, matrix)) is not None:
            return self._add_parts(x, parts, residual)[0]
        tile = self._tile("linear", x, matrix, matrix.shape[0])
        if tile is None:
            return ops.norm_linear.reference(x, None, weight, residual)
        return self._linear(x, matrix, bias, residual, tile)

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tile: Tile,
        squares: Tensor | None = None, eps: float = 0.0, scaling: tuple[Tensor | None, ...] = (None, None, None),
    ) -> Tensor:  # fmt: skip
        """Launch `linear_kernel`.

        Args:
            squares: float32 [T, parts]. None unless this is the second linear around a norm.
            scaling: norm, scaled_out and squares_out of the first linear around a norm.
        """
        x = contiguous_rows(x)
        out = x.new_empty(x.shape[0], weight.shape[0])
        residual = None if residual is None else contiguous_rows(residual)
        programs, parts = ceil_div(weight.shape[0], tile.columns), 0 if squares is None else squares.shape[1]
        self.launch(
            linear_kernel, (programs,),
            x, weight, bias, residual, out, *scaling, squares, x.shape[0], weight.shape[0], weight.shape[1],
            x.stride(0), 0 if residual is None else residual.stride(0), parts, eps, PARTS=power_of_two(parts),
            **self._shape(tile, x, programs),
        )  # fmt: skip
        return out

    def _own(self, x: Tensor, bias: Tensor | None) -> ManyRows | None:
        """Return the device's own linears if they may take this one. Otherwise None."""
        return self.options.many_rows if bias is None and x.dtype in HALVES else None

    def _add_parts(
        self, x: Tensor, parts: Tensor, residual: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of parts [S, T, out] in the dtype of x, plus residual, and its rms_norm if norm is given."""
        split, rows, columns = parts.shape
        out = x.new_empty(rows, columns)
        normed = out if norm is None else x.new_empty(rows, columns)
        residual = None if residual is None else contiguous_rows(residual)
        self.launch(
            add_parts_kernel, (rows,),
            parts, residual, out, norm, normed, rows, columns, 0 if residual is None else residual.stride(0), eps,
            SPLIT=split, WIDTH=power_of_two(columns), num_warps=8,
        )  # fmt: skip
        return out, normed

    def _tile(self, kind: str, x: Tensor, weight: Tensor, columns: int) -> Tile | None:
        count, depth = x.shape[0], weight.shape[1]
        if not 0 < count <= MAX_ROWS or x.dtype not in HALVES or weight.dtype != x.dtype or not weight.is_contiguous():
            return None
        tile = self.options.tile(kind, tile_rows(count), columns, depth)
        return tile if tile is not None and depth % tile.depth == 0 else None

    def _shape(self, tile: Tile, x: Tensor, programs: int) -> dict[str, Any]:
        count = x.shape[0]
        # Without a mask a program reads all rows of a tile. This costs time if several programs share a multiprocessor.
        # With a mask, a program alone on a multiprocessor may wait for the mask's selects.
        unmasked = count > 1 and count % 16 != 0 and programs <= self.options.compute_units
        return self._tile_options(tile, count, masked=not unmasked)

    def _tile_options(self, tile: Tile, count: int, masked: bool) -> dict[str, Any]:
        """Return the options of a launch of a linear of `count` rows."""
        return {
            "MASKED": masked,
            "ROWS": tile_rows(count),
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "PREFETCH": tile.prefetch,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

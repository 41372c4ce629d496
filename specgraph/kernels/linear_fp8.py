"""Linears over FP8 weights (e4m3), multiplied in float16.

e4m3 fits float16, and one instruction converts two numbers; to bfloat16 it takes three. Each row of activations is
divided by a power of two first. So it fits float16 as well, and has three more bits than in bfloat16.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph import ops
from specgraph.kernels.launch import Tile, ceil_div, contiguous_rows, power_of_two, tile_rows
from specgraph.kernels.linear import HALVES, MAX_ROWS, LinearOps, load_rows
from specgraph.kernels.norm import normed_row
from specgraph.ops.linear import Norm, Weight, dequantised

_WIDEST = 32768
"""The most columns that `scaled_kernel` holds at once."""


@triton.jit
def scaled_kernel(x, norm, scaled, factors, width, x_stride, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Write scaled, float16 [T, width], and factors [T]. Their product is x [T, width], or rms_norm(x) with `norm`.

    One program per row.
    """
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    values = normed_row(x + row * x_stride, norm, width, eps, WIDTH)
    if norm is not None:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    factor = tl.exp2(tl.ceil(tl.log2(largest)) - 8.0)  # scaled is at most 2 ** 8, and products 2 ** 8 * 448
    tl.store(scaled + row * width + column, (values / factor).to(tl.float16), mask=inside)
    tl.store(factors + row, factor)


@triton.jit
def dequantise_kernel(
    weight, scale, out, depth, scale_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """Compute out = weight * scale in the dtype of out, one program per row and WIDTH of its columns."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = inner < depth
    values = tl.load(weight + row * depth + inner, mask=inside, other=0.0).to(tl.float32)
    if GROUP:
        values *= tl.load(scale + inner // GROUP * scale_stride + row, mask=inside, other=0.0)
    else:
        values *= tl.load(scale + row)
    tl.store(out + row * depth + inner, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def first_bytes(weight, columns, depth, PREFETCH: tl.constexpr):
    """Return addresses as `first_lines` does, for a weight of one byte per element."""
    lines = tl.arange(0, PREFETCH // 128) * 128
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def add_product(acc, a, weights, scales, GROUPED: tl.constexpr):
    """Return acc + a @ weights.T. With GROUPED, the product is scaled before it is added."""
    if GROUPED:
        acc += tl.dot(a, tl.trans(weights.to(a.dtype))) * tl.load(scales)[None, :]
    else:
        acc = tl.dot(a, tl.trans(weights.to(a.dtype)), acc)
    return acc


@triton.jit
def linear_fp8_kernel(
    scaled, factors, weight, scale, bias, residual, out, rows, columns, depth, scale_stride, residual_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out = x @ (weight * scale).T + bias + residual, one program per block of COLUMNS.

    x comes from `scaled_kernel`: scaled [ROWS, depth], with data in the first `rows` rows, and factors. GROUP is the
    number of input columns that share a scale, or 0 if all do.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = scaled + row[:, None] * depth + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(a_rows + k, live, MASKED)
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        acc = add_product(acc, a, w, at, GROUP > 0)
    result = acc * tl.load(factors + row, mask=live, other=0.0)[:, None]
    if GROUP == 0:
        result *= tl.load(scale + safe)[None, :]
    mask = live[:, None] & (column < columns)[None, :]
    if bias is not None:
        result += tl.load(bias + safe)[None, :].to(tl.float32)
    if residual is not None:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        at = residual + row[:, None] * residual_stride + column[None, :]
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


class Fp8LinearOps(LinearOps):
    """The implementation of `specgraph.ops.norm_linear` that also takes FP8 weights."""

    __slots__ = ()

    def norm_linear(self, x: Tensor, norm: Norm | None, weight: Weight, residual: Tensor | None = None) -> Tensor:
        matrix, bias, scale = weight
        if scale is None:
            return LinearOps.norm_linear(self, x, norm, weight, residual)
        if not self.options.float8:
            return NotImplemented
        columns = matrix.shape[0]
        tile = self._fp8_tile("linear_fp8", x, matrix, scale, columns)
        if tile is None:
            dense = Weight(self._dequantised(matrix, scale, x.dtype), bias)
            return ops.norm_linear.reference(self._normed(x, norm), None, dense, residual)
        scaled, factors = self._scaled(x, norm)
        out = x.new_empty(x.shape[0], columns)
        residual = None if residual is None else contiguous_rows(residual)
        self.launch(
            linear_fp8_kernel, (ceil_div(columns, tile.columns),),
            scaled, factors, matrix, scale, bias, residual, out, x.shape[0], columns, matrix.shape[1], scale.stride(0),
            0 if residual is None else residual.stride(0), **self._fp8_shape(tile, x.shape[0], matrix, scale),
        )  # fmt: skip
        return out

    def _scaled(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Return the results of `scaled_kernel` for x: scaled and factors.

        scaled has the rows of a whole tile, so that linears may read it without a mask. Rows past T are not written.
        """
        x = contiguous_rows(x)
        rows, width = x.shape
        scaled = x.new_empty(tile_rows(rows), width, dtype=torch.float16)
        factors = x.new_empty(rows, dtype=torch.float32)
        self.launch(
            scaled_kernel, (rows,),
            x, norm and norm.weight, scaled, factors, width, x.stride(0), norm.eps if norm else 0.0,
            WIDTH=power_of_two(width), num_warps=8,
        )  # fmt: skip
        return scaled, factors

    def _dequantised(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if not weight.is_contiguous() or scale.stride(-1) != 1:
            return dequantised(weight, scale, dtype)
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        (columns, depth), wide = weight.shape, min(power_of_two(weight.shape[1]), 4096)
        self.launch(
            dequantise_kernel, (columns, ceil_div(depth, wide)),
            weight, scale, out, depth, scale.stride(0), GROUP=_group(weight, scale), WIDTH=wide, num_warps=4,
        )  # fmt: skip
        return out

    def _fp8_tile(self, kind: str, x: Tensor, weight: Tensor, scale: Tensor, columns: int) -> Tile | None:
        """Return the tile. None if the weight must be dequantised instead.

        That is so with no rows or too many, with another dtype, or if no tile divides the columns.
        """
        depth, whole = weight.shape[1], weight.is_contiguous() and scale.stride(-1) == 1
        if not 0 < x.shape[0] <= MAX_ROWS or x.dtype not in HALVES or depth > _WIDEST or not whole:
            return None
        tile = self.options.tile(kind, tile_rows(x.shape[0]), columns, depth)
        if tile is None:
            return None
        group, wide = depth // scale.shape[0], tile.depth
        while group % wide and wide > 32:
            wide //= 2
        if group % wide:
            return None
        return tile if wide == tile.depth else replace(tile, depth=wide)

    def _fp8_shape(self, tile: Tile, count: int, weight: Tensor, scale: Tensor) -> dict[str, Any]:
        tile = replace(tile, prefetch=max(tile.prefetch, 128))
        masked = not 1 < count <= 32  # measured: see the tiles of the backend
        return {"GROUP": _group(weight, scale), **self._tile_options(tile, count, masked)}


def _group(weight: Tensor, scale: Tensor) -> int:
    """Return the number of input columns that share a scale, or 0 if all do."""
    return 0 if scale.shape[0] == 1 else weight.shape[1] // scale.shape[0]

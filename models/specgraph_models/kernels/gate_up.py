"""Triton kernels of the gated linears of models, silu(gate) * up, for weights of the model's dtype and for FP8."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Tile, ceil_div, power_of_two
from specgraph.kernels.linear import HALVES, first_lines, load_rows, load_squares, x_row_starts
from specgraph.kernels.linear_fp8 import Fp8LinearOps, add_product, first_bytes
from specgraph.ops.linear import Norm, Weight, norm_linear
from specgraph_models.ops.linear import norm_gate_up


@triton.jit
def gate_up_kernel(
    x, weight, bias, out, squares, rows, columns, depth, x_stride, parts, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out = silu(gate) * up with (gate | up) = x @ weight.T + bias. `columns` is the number of out's columns.

    squares: as in `linear_kernel`.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_lines(weight, safe + columns, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x_row_starts(x, weight, row, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    if squares is not None:
        square = load_squares(squares, row, live, parts, PARTS)
        if ROWS > 16:
            square = tl.sum(square, axis=1, keep_dims=True)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        gate = tl.dot(a, tl.trans(tl.load(gate_rows + k, eviction_policy="evict_first")), gate)
        up = tl.dot(a, tl.trans(tl.load(up_rows + k, eviction_policy="evict_first")), up)
    if squares is not None:
        factor = tl.rsqrt(tl.sum(square, axis=1) / depth + eps)[:, None]
        gate *= factor
        up *= factor
    if bias is not None:
        gate += tl.load(bias + safe)[None, :].to(tl.float32)
        up += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(packed, out, columns, packed_stride, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute out [rows, columns] = silu(gate) * up of rows (gate | up), one program per row and COLUMNS columns."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = packed + row * packed_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_up_fp8_kernel(
    scaled, factors, weight, scale, bias, out, rows, columns, depth, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out = silu(gate) * up with (gate | up) = x @ (weight * scale).T + bias.

    `columns` is the number of out's columns. x is as in `linear_fp8_kernel`.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_bytes(weight, safe + columns, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = scaled + row[:, None] * depth + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(a_rows + k, live, MASKED)
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        w = tl.load(gate_rows + k, eviction_policy="evict_first")
        gate = add_product(gate, a, w, at, GROUP > 0)
        w = tl.load(up_rows + k, eviction_policy="evict_first")
        up = add_product(up, a, w, at + columns, GROUP > 0)
    factor = tl.load(factors + row, mask=live, other=0.0)[:, None]
    left = gate * factor
    right = up * factor
    if GROUP == 0:
        left *= tl.load(scale + safe)[None, :]
        right *= tl.load(scale + columns + safe)[None, :]
    if bias is not None:
        left += tl.load(bias + safe)[None, :].to(tl.float32)
        right += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    left = left.to(out.dtype.element_ty).to(tl.float32)
    right = right.to(out.dtype.element_ty).to(tl.float32)
    result = left * tl.sigmoid(left) * right
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


class GateUpOps(Fp8LinearOps):
    """The implementation of `specgraph_models.ops.norm_gate_up`."""

    __slots__ = ()

    def norm_gate_up(self, x: Tensor, norm: Norm | None, weight: Weight) -> Tensor:
        matrix, bias, scale = weight
        if scale is not None:
            return self._gate_up_fp8(x, norm, matrix, bias, scale)
        x = self._normed(x, norm)
        own = self._own(x, bias)
        if own is not None and (gated := own.gated(x, matrix)) is not None:
            return gated
        tile = self._tile("gate_up", x, matrix, matrix.shape[0] // 2)
        if tile is None:
            if x.dtype not in HALVES:
                return norm_gate_up.reference(x, None, weight)
            return self._gated(norm_linear.reference(x, None, weight))
        return self._gate_up(x, matrix, bias, tile)

    def _gate_up(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, squares: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Launch `gate_up_kernel`. squares: as in `_linear`."""
        columns = weight.shape[0] // 2
        out, programs = x.new_empty(x.shape[0], columns), ceil_div(columns, tile.columns)
        parts = 0 if squares is None else squares.shape[1]
        self.launch(
            gate_up_kernel, (programs,),
            x, weight, bias, out, squares, x.shape[0], columns, weight.shape[1], x.stride(0), parts, eps,
            PARTS=power_of_two(parts), **self._shape(tile, x, programs),
        )  # fmt: skip
        return out

    def _gated(self, packed: Tensor) -> Tensor:
        rows, columns = packed.shape[0], packed.shape[1] // 2
        out = packed.new_empty(rows, columns)
        if rows:
            self.launch(
                gate_kernel, (rows, ceil_div(columns, 2048)),
                packed, out, columns, packed.stride(0), COLUMNS=2048, num_warps=4,
            )  # fmt: skip
        return out

    def _gate_up_fp8(self, x: Tensor, norm: Norm | None, matrix: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
        if not self.options.float8:
            return NotImplemented
        columns = matrix.shape[0] // 2
        tile = self._fp8_tile("gate_up_fp8", x, matrix, scale, columns)
        if tile is None:
            dense = Weight(self._dequantised(matrix, scale, x.dtype), bias)
            return norm_gate_up.reference(self._normed(x, norm), None, dense)
        scaled, factors = self._scaled(x, norm)
        out = x.new_empty(x.shape[0], columns)
        self.launch(
            gate_up_fp8_kernel, (ceil_div(columns, tile.columns),),
            scaled, factors, matrix, scale, bias, out, x.shape[0], columns, matrix.shape[1], scale.stride(0),
            **self._fp8_shape(tile, x.shape[0], matrix, scale),
        )  # fmt: skip
        return out

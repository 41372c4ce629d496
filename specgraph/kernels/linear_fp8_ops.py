"""Launching the Triton linears over FP8 weights: those of `linear_ops` where a weight has a scale."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgraph import ops
from specgraph.kernels import linear_fp8
from specgraph.kernels.launch import Tile, ceil_div, contiguous_rows, power_of_two, tile_rows
from specgraph.kernels.linear_ops import HALVES, MAX_ROWS, LinearOps
from specgraph.ops.linear import Norm, Weight, dequantised

_WIDEST = 32768
"""Columns that `scaled_kernel` holds at once."""


class Fp8LinearOps(LinearOps):
    """Implementations of the ops in `specgraph.ops.linear`, over FP8 weights too."""

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
            linear_fp8.linear_fp8_kernel, (ceil_div(columns, tile.columns),),
            scaled, factors, matrix, scale, bias, residual, out, x.shape[0], columns, matrix.shape[1], scale.stride(0),
            0 if residual is None else residual.stride(0), **self._fp8_shape(tile, x.shape[0], matrix, scale),
        )  # fmt: skip
        return out

    def norm_gate_up(self, x: Tensor, norm: Norm | None, weight: Weight) -> Tensor:
        matrix, bias, scale = weight
        if scale is None:
            return LinearOps.norm_gate_up(self, x, norm, weight)
        if not self.options.float8:
            return NotImplemented
        columns = matrix.shape[0] // 2
        tile = self._fp8_tile("gate_up_fp8", x, matrix, scale, columns)
        if tile is None:
            dense = Weight(self._dequantised(matrix, scale, x.dtype), bias)
            return ops.norm_gate_up.reference(self._normed(x, norm), None, dense)
        scaled, factors = self._scaled(x, norm)
        out = x.new_empty(x.shape[0], columns)
        self.launch(
            linear_fp8.gate_up_fp8_kernel, (ceil_div(columns, tile.columns),),
            scaled, factors, matrix, scale, bias, out, x.shape[0], columns, matrix.shape[1], scale.stride(0),
            **self._fp8_shape(tile, x.shape[0], matrix, scale),
        )  # fmt: skip
        return out

    def _scaled(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """rms_norm(x), or x, as float16 and a factor [T] per row: see `linear_fp8.scaled_kernel`.

        The former has the rows of a whole tile, so that linears may read it without a mask;
        those past T are not written.
        """
        x = contiguous_rows(x)
        rows, width = x.shape
        scaled = x.new_empty(tile_rows(rows), width, dtype=torch.float16)
        factors = x.new_empty(rows, dtype=torch.float32)
        self.launch(
            linear_fp8.scaled_kernel, (rows,),
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
            linear_fp8.dequantise_kernel, (columns, ceil_div(depth, wide)),
            weight, scale, out, depth, scale.stride(0), GROUP=_group(weight, scale), WIDTH=wide, num_warps=4,
        )  # fmt: skip
        return out

    def _fp8_tile(self, kind: str, x: Tensor, weight: Tensor, scale: Tensor, columns: int) -> Tile | None:
        """Return None where the weight is dequantised: no rows or too many, another dtype, or columns that no tile
        divides."""
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
        masked = not 1 < count <= 32  # as measured, see the backend with the tiles
        return {"GROUP": _group(weight, scale), **self._tile_options(tile, count, masked)}


def _group(weight: Tensor, scale: Tensor) -> int:
    """Input columns that share a scale; 0 for all of them."""
    return 0 if scale.shape[0] == 1 else weight.shape[1] // scale.shape[0]

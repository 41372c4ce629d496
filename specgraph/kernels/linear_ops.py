"""Launching the Triton linears of few rows."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph import ops
from specgraph.kernels import linear
from specgraph.kernels import norm as norm_kernels
from specgraph.kernels.launch import Launcher, ManyRows, Tile, ceil_div, contiguous_rows, power_of_two, tile_rows
from specgraph.ops.linear import Norm, PairInput, Weight, normed

MAX_ROWS = 64
"""Above this many rows a linear takes longer than reading its weights, and the library's matmul is as fast; a weight in
FP8 is dequantised for it by a kernel of its own."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of x that the kernels multiply."""


class LinearOps(Launcher):
    """Implementations of the ops in `specgraph.ops.linear`."""

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
        """squares: float32 [T, parts] where rows of x are still to be divided; scaling: norm, scaled_out and
        squares_out; see `linear.linear_kernel`."""
        x = contiguous_rows(x)
        out = x.new_empty(x.shape[0], weight.shape[0])
        residual = None if residual is None else contiguous_rows(residual)
        programs, parts = ceil_div(weight.shape[0], tile.columns), 0 if squares is None else squares.shape[1]
        self.launch(
            linear.linear_kernel, (programs,),
            x, weight, bias, residual, out, *scaling, squares, x.shape[0], weight.shape[0], weight.shape[1],
            x.stride(0), 0 if residual is None else residual.stride(0), parts, eps, PARTS=power_of_two(parts),
            **self._shape(tile, x, programs),
        )  # fmt: skip
        return out

    def _linear_squared(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tile: Tile, norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the linear, its product with the norm's weight, and the squares that the linear after it takes."""
        scaled = x.new_empty(x.shape[0], weight.shape[0])
        squares = x.new_empty(x.shape[0], ceil_div(weight.shape[0], tile.columns), dtype=torch.float32)
        out = self._linear(x, weight, bias, residual, tile, scaling=(norm, scaled, squares))
        return out, scaled, squares

    def norm_gate_up(self, x: Tensor, norm: Norm | None, weight: Weight) -> Tensor:
        x = self._normed(x, norm)
        matrix, bias, _ = weight
        own = self._own(x, bias)
        if own is not None and (gated := own.gated(x, matrix)) is not None:
            return gated
        tile = self._tile("gate_up", x, matrix, matrix.shape[0] // 2)
        if tile is None:
            if x.dtype not in HALVES:
                return ops.norm_gate_up.reference(x, None, weight)
            return self._gated(ops.norm_linear.reference(x, None, weight))
        return self._gate_up(x, matrix, bias, tile)

    def _gate_up(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, squares: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """squares: as in `_linear`."""
        columns = weight.shape[0] // 2
        out, programs = x.new_empty(x.shape[0], columns), ceil_div(columns, tile.columns)
        parts = 0 if squares is None else squares.shape[1]
        self.launch(
            linear.gate_up_kernel, (programs,),
            x, weight, bias, out, squares, x.shape[0], columns, weight.shape[1], x.stride(0), parts, eps,
            PARTS=power_of_two(parts), **self._shape(tile, x, programs),
        )  # fmt: skip
        return out

    def _own(self, x: Tensor, bias: Tensor | None) -> ManyRows | None:
        """Return the device's own linears, where they may take this one."""
        return self.options.many_rows if bias is None and x.dtype in HALVES else None

    def _add_parts(
        self, x: Tensor, parts: Tensor, residual: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of parts [S, T, out] in the dtype of x, plus residual; and its rms_norm, if there is a
        norm."""
        split, rows, columns = parts.shape
        out = x.new_empty(rows, columns)
        normed = out if norm is None else x.new_empty(rows, columns)
        residual = None if residual is None else contiguous_rows(residual)
        self.launch(
            linear.add_parts_kernel, (rows,),
            parts, residual, out, norm, normed, rows, columns, 0 if residual is None else residual.stride(0), eps,
            SPLIT=split, WIDTH=power_of_two(columns), num_warps=8,
        )  # fmt: skip
        return out, normed

    def _gated(self, packed: Tensor) -> Tensor:
        rows, columns = packed.shape[0], packed.shape[1] // 2
        out = packed.new_empty(rows, columns)
        if rows:
            self.launch(
                linear.gate_kernel, (rows, ceil_div(columns, 2048)),
                packed, out, columns, packed.stride(0), COLUMNS=2048, num_warps=4,
            )  # fmt: skip
        return out

    def pair_linear(self, token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
        return self.norm_linear(self._pair(token_ids, hidden, pair), None, weight)

    def _pair(self, token_ids: Tensor, hidden: Tensor, pair: PairInput) -> Tensor:
        """cat(rms_norm(table[token_ids]), rms_norm(hidden)): [T, E + H]."""
        table, table_norm, hidden_norm, eps = pair
        if table.stride(1) != 1:  # a copy of the whole table would be made at every call
            token_ids, table = torch.arange(token_ids.shape[0], device=table.device), table[token_ids]
        hidden = contiguous_rows(hidden)
        rows_, width, hidden_width = hidden.shape[0], table.shape[1], hidden.shape[1]
        out = hidden.new_empty(rows_, width + hidden_width)
        if rows_:
            self.launch(
                norm_kernels.pair_kernel, (rows_, 2),
                token_ids.contiguous(), table, table_norm, hidden, hidden_norm, out, table.stride(0), width,
                hidden_width, hidden.stride(0), eps, WIDTH=power_of_two(width),
                HIDDEN_WIDTH=power_of_two(hidden_width), num_warps=8,
            )  # fmt: skip
        return out

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """rms_norm(x) with contiguous rows; x itself without a norm."""
        x = contiguous_rows(x)
        if norm is None:
            return x
        if x.shape[0] == 0 or x.dim() != 2:
            return normed(x, *norm)
        out, width = x.new_empty(x.shape), x.shape[1]
        self.launch(
            norm_kernels.norm_kernel, (x.shape[0],),
            x, norm.weight, out, width, x.stride(0), norm.eps, WIDTH=power_of_two(width), num_warps=8
        )  # fmt: skip
        return out

    def _tile(self, kind: str, x: Tensor, weight: Tensor, columns: int) -> Tile | None:
        count, depth = x.shape[0], weight.shape[1]
        if not 0 < count <= MAX_ROWS or x.dtype not in HALVES or weight.dtype != x.dtype or not weight.is_contiguous():
            return None
        tile = self.options.tile(kind, tile_rows(count), columns, depth)
        return tile if tile is not None and depth % tile.depth == 0 else None

    def _shape(self, tile: Tile, x: Tensor, programs: int) -> dict[str, Any]:
        count = x.shape[0]
        # Without a mask a program reads all rows of a tile, which costs time where several share a multiprocessor. One
        # alone may wait for the selects that a mask takes.
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

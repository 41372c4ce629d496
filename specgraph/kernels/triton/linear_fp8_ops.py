"""Launching the Triton linears over FP8 weights."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.kernels.triton import linear_fp8
from specgraph.kernels.triton.launch import Tile, ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.triton.linear_ops import LinearOps

MOST_ROWS = 128
"""Rows per program."""

WEIGHTS_FIRST = 64
"""From this many rows per program on, weights are the first operand."""

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Fp8LinearOps(LinearOps):
    """Implementations of the ops in `specgraph.kernels.linear_fp8`."""

    def norm_linear_fp8(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.norm_linear_fp8`."""
        x = self._normed(x, norm, eps)
        tile = self._fp8_tile("linear_fp8", x, weight, scale, weight.shape[0])
        if tile is None:
            return kernels.norm_linear_fp8.reference(x, None, eps, weight, scale, bias, residual)
        out = x.new_empty(x.shape[0], weight.shape[0])
        residual = None if residual is None else contiguous_rows(residual)
        rows, columns = _padded(x.shape[0]), weight.shape[0]
        linear_fp8.linear_fp8_kernel[(ceil_div(x.shape[0], rows), ceil_div(columns, tile.columns))](
            x, weight, scale, bias, residual, out, x.shape[0], columns, weight.shape[1], x.stride(0), scale.stride(0),
            0 if residual is None else residual.stride(0), BIASED=bias is not None, RESIDUAL=residual is not None,
            **self._fp8_shape(tile, rows, weight, scale),
        )  # fmt: skip
        return out

    def norm_gate_up_fp8(
        self, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See `specgraph.kernels.norm_gate_up_fp8`."""
        columns = weight.shape[0] // 2
        x = self._normed(x, norm, eps)
        tile = self._fp8_tile("gate_up_fp8", x, weight, scale, columns)
        if tile is None:
            return kernels.norm_gate_up_fp8.reference(x, None, eps, weight, scale, bias)
        out, rows = x.new_empty(x.shape[0], columns), _padded(x.shape[0])
        linear_fp8.gate_up_fp8_kernel[(ceil_div(x.shape[0], rows), ceil_div(columns, tile.columns))](
            x, weight, scale, bias, out, x.shape[0], columns, weight.shape[1], x.stride(0), scale.stride(0),
            BIASED=bias is not None, **self._fp8_shape(tile, rows, weight, scale),
        )  # fmt: skip
        return out

    def pair_linear_fp8(
        self, token_ids: Tensor, table: Tensor, table_norm: Tensor | None, hidden: Tensor,
        hidden_norm: Tensor | None, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.kernels.pair_linear_fp8`."""
        pair = self._pair(token_ids, table, table_norm, hidden, hidden_norm, eps)
        return self.norm_linear_fp8(pair, None, eps, weight, scale, bias, None)

    def _fp8_tile(self, kind: str, x: Tensor, weight: Tensor, scale: Tensor, columns: int) -> Tile | None:
        """None where the reference runs: no rows, another dtype, or columns that no tile divides."""
        depth = weight.shape[1]
        if not x.shape[0] or x.dtype not in _HALVES or not weight.is_contiguous() or scale.stride(-1) != 1:
            return None
        tile = self.options.tile(kind, _padded(x.shape[0]), columns, depth)
        if tile is None:
            return None
        group, wide = depth // scale.shape[0], tile.depth
        while group % wide and wide > 16:
            wide //= 2
        if group % wide:
            return None
        return tile if wide == tile.depth else replace(tile, depth=wide)

    def _fp8_shape(self, tile: Tile, rows: int, weight: Tensor, scale: Tensor) -> dict[str, Any]:
        return {
            "GROUP": 0 if scale.shape[0] == 1 else weight.shape[1] // scale.shape[0],
            "WEIGHTS_FIRST": rows >= WEIGHTS_FIRST,
            "ROWS": rows,
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "PREFETCH": max(tile.prefetch, 128),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **self.common(),
        }


def _padded(count: int) -> int:
    return min(max(16, power_of_two(count)), MOST_ROWS)

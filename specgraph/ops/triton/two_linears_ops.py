"""Launching two linears with a residual sum and a norm between them."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.ops.triton.launch import Tile
from specgraph.ops.triton.linear_ops import HALVES, LinearOps

WIDE = (torch.bfloat16,)
"""Dtypes of which total * norm overflows no sooner than total: float16's range may end before it is normalised."""


class Summed(NamedTuple):
    """The first of the two, and what the second takes."""

    total: Tensor
    """[T, size]: the product and the residual."""
    x: Tensor
    """[T, size]: rms_norm(total), or total * norm where `squares` is given."""
    squares: Tensor | None
    """float32 [T, parts]: sums of the squares of total, see `linear.linear_kernel`."""
    tile: Tile | None
    """That of the second, where `squares` is given."""


@dataclass(frozen=True, slots=True)
class TwoLinearOps(LinearOps):
    """Implementations of the ops in `specgraph.ops.two_linears`."""

    def linear_norm_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float,
        next_weight: Tensor, next_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `specgraph.ops.linear_norm_linear`."""
        if (own := self.options.two_linears) is not None and bias is None and next_bias is None:
            both = own(x, weight, residual, norm, eps, next_weight, False)
            if both is not None:
                return both
        few = self.options.few_rows  # reads weights ahead while the norm's kernel runs
        if few is not None and bias is None and (total := few.linear(x, weight, residual)) is not None:
            return total, self.norm_linear(total, norm, eps, next_weight, next_bias)
        first = self._summed(x, weight, bias, residual, norm, eps, "linear", next_weight, next_weight.shape[0])
        if first.tile is None:
            return first.total, self.norm_linear(first.x, None, 0.0, next_weight, next_bias)
        return first.total, self._linear(first.x, next_weight, next_bias, None, first.tile, first.squares, eps)

    def linear_norm_gate_up(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float,
        gate_up: Tensor, gate_up_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `specgraph.ops.linear_norm_gate_up`."""
        if (own := self.options.two_linears) is not None and bias is None and gate_up_bias is None:
            both = own(x, weight, residual, norm, eps, gate_up, True)
            if both is not None:
                return both
        columns, own = gate_up.shape[0] // 2, self._own(residual, gate_up_bias)
        kind = None if own is not None and own.takes("GATED", residual, gate_up) else "gate_up"
        first = self._summed(x, weight, bias, residual, norm, eps, kind, gate_up, columns)
        if first.tile is None:
            return first.total, self.norm_gate_up(first.x, None, 0.0, gate_up, gate_up_bias)
        return first.total, self._gate_up(first.x, gate_up, gate_up_bias, first.tile, first.squares, eps)

    def _summed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float,
        kind: str | None, next_weight: Tensor, next_columns: int,
    ) -> Summed:  # fmt: skip
        """The first linear with the residual, and its norm as far as the second needs it.

        kind: of the second's tile; None where it takes normed rows.
        """
        own = self._own(x, bias)
        if own is not None and (parts := own.parts(x, weight)) is not None:
            return Summed(*self._add_parts(x, parts, residual, norm, eps), None, None)
        tile = self._tile("linear", x, weight, weight.shape[0])
        if tile is not None:
            second = self._tile(kind, x, next_weight, next_columns) if kind and x.dtype in WIDE else None
            if second is not None:
                return Summed(*self._linear_squared(x, weight, bias, residual, tile, norm), second)
            total = self._linear(x, weight, bias, residual, tile)
        elif x.dtype in HALVES and x.shape[0]:
            parts = functional.linear(x, weight, bias)[None]
            return Summed(*self._add_parts(x, parts, residual, norm, eps), None, None)
        else:
            total = ops.norm_linear.reference(x, None, 0.0, weight, bias, residual)
        return Summed(total, self._normed(total, norm, eps), None, None)

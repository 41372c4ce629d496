"""Two linears with a residual sum and a norm between them, and the linear of a draft head's two inputs."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.kernels.launch import Tile, ceil_div
from specgraph.kernels.linear import HALVES
from specgraph.ops.linear import Norm, PairInput, Weight
from specgraph_models.kernels.delta import DeltaOps
from specgraph_models.kernels.recurrent import RecurrentOps

WIDE = (torch.bfloat16,)
"""Dtypes with enough range for total * norm before it is divided by the root mean square. float16 may overflow."""


class Summed(NamedTuple):
    """The result of the first of two linears, and the input of the second."""

    total: Tensor
    """[T, size]: the product and the residual."""
    x: Tensor
    """[T, size]: total * norm if `squares` is given. Otherwise rms_norm(total)."""
    squares: Tensor | None
    """float32 [T, parts]: sums of the squares of total, see `linear_kernel`."""
    tile: Tile | None
    """The tile of the second linear if `squares` is given. Otherwise None."""


class ModelOps(RecurrentOps, DeltaOps):
    """Implementations of the ops in `specgraph_models.ops`."""

    __slots__ = ()

    def pair_linear(self, token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
        return self.norm_linear(self._pair(token_ids, hidden, pair), None, weight)

    def linear_norm_linear(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
    ) -> tuple[Tensor, Tensor]:
        if weight.scale is not None or following.scale is not None:
            return self._apart(self.norm_linear, x, weight, residual, norm, following)
        if (both := self._in_one(x, weight, residual, norm, following, gated=False)) is not None:
            return both
        few = self.options.few_rows  # its kernel reads weights ahead while the norm's kernel runs
        if few is not None and weight.bias is None and (total := few.linear(x, weight.matrix, residual)) is not None:
            return total, self.norm_linear(total, norm, following)
        first = self._summed(x, weight, residual, norm, "linear", following.matrix, following.matrix.shape[0])
        if first.tile is None:
            return first.total, self.norm_linear(first.x, None, following)
        return first.total, self._linear(
            first.x, following.matrix, following.bias, None, first.tile, first.squares, norm.eps
        )

    def linear_norm_gate_up(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
    ) -> tuple[Tensor, Tensor]:
        if weight.scale is not None or following.scale is not None:
            return self._apart(self.norm_gate_up, x, weight, residual, norm, following)
        if (both := self._in_one(x, weight, residual, norm, following, gated=True)) is not None:
            return both
        columns, own = following.matrix.shape[0] // 2, self._own(residual, following.bias)
        kind = None if own is not None and own.takes("GATED", residual, following.matrix) else "gate_up"
        first = self._summed(x, weight, residual, norm, kind, following.matrix, columns)
        if first.tile is None:
            return first.total, self.norm_gate_up(first.x, None, following)
        return first.total, self._gate_up(
            first.x, following.matrix, following.bias, first.tile, first.squares, norm.eps
        )

    def _apart(
        self, second: Callable[[Tensor, Norm, Weight], Tensor], x: Tensor, weight: Weight, residual: Tensor, norm: Norm,
        following: Weight,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run two linears one after the other. At least one has an FP8 weight."""
        if not self.options.float8:
            return NotImplemented
        total = self.norm_linear(x, None, weight, residual)
        return total, second(total, norm, following)

    def _in_one(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight, gated: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run both linears in the device's own kernel. Return None if it has none for them."""
        if self.options.two_linears is None or weight.bias is not None or following.bias is not None:
            return None
        return self.options.two_linears(x, weight.matrix, residual, *norm, following.matrix, gated)

    def _summed(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Norm, kind: str | None, next_matrix: Tensor,
        next_columns: int,
    ) -> Summed:  # fmt: skip
        """Run the first linear with the residual, and the norm or the part of it that the second linear needs.

        kind: the kind of the second linear's tile. None if the second linear needs normed rows.
        """
        matrix, bias, _ = weight
        own = self._own(x, bias)
        if own is not None and (parts := own.parts(x, matrix)) is not None:
            return Summed(*self._add_parts(x, parts, residual, *norm), None, None)
        tile = self._tile("linear", x, matrix, matrix.shape[0])
        if tile is not None:
            second = self._tile(kind, x, next_matrix, next_columns) if kind and x.dtype in WIDE else None
            if second is not None:
                return Summed(*self._linear_squared(x, matrix, bias, residual, tile, norm.weight), second)
            total = self._linear(x, matrix, bias, residual, tile)
        elif x.dtype in HALVES and x.shape[0]:
            parts = functional.linear(x, matrix, bias)[None]
            return Summed(*self._add_parts(x, parts, residual, *norm), None, None)
        else:
            total = ops.norm_linear.reference(x, None, weight, residual)
        return Summed(total, self._normed(total, norm), None, None)

    def _linear_squared(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tile: Tile, norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the linear's result, its product with the norm's weight, and the squares for the second linear."""
        scaled = x.new_empty(x.shape[0], weight.shape[0])
        squares = x.new_empty(x.shape[0], ceil_div(weight.shape[0], tile.columns), dtype=torch.float32)
        out = self._linear(x, weight, bias, residual, tile, scaling=(norm, scaled, squares))
        return out, scaled, squares

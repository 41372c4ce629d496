"""A linear with the parts that a device can fuse into it: the norm before it and the residual after it.

The reference composes plain torch ops, and defines the results. A fused implementation may round once instead of twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.library import op

FP8 = torch.float8_e4m3fn


class Norm(NamedTuple):
    """A root mean square norm of each row: x / rms(x) * weight."""

    weight: Tensor
    """[size], in the dtype of x or in float32 (a sum 1 + weight has more digits than bfloat16)."""
    eps: float


class Weight(NamedTuple):
    """The matrix of a linear, in the model's dtype, or as FP8 with scales beside it.

    Activations are not quantised: an FP8 matrix gives the results of the dequantised matrix, up to rounding. A device
    reads half the bytes of bfloat16.
    """

    matrix: Tensor
    """[out, in]; float8_e4m3fn if there is a scale."""
    bias: Tensor | None = None
    """[out]"""
    scale: Tensor | None = None
    """float32 [groups, out]: each row of `matrix` has one scale for every in / groups of its columns. With one group
    each row has one scale. A checkpoint's scale of a whole tensor, or of a block of rows, is repeated for each row."""

    def rows(self, kept: slice | Tensor) -> Weight:
        """Return the weight for some of the outputs: views of a slice of them, or copies of those of int64 [n]."""
        bias, scale = self.bias, self.scale
        rest = None if bias is None else bias[kept], None if scale is None else scale[:, kept]
        return Weight(self.matrix[kept], *rest)

    def named_tensors(self, name: str) -> dict[str, Tensor]:
        parts = {name: self.matrix, f"{name}_bias": self.bias, f"{name}_scale": self.scale}
        return {key: tensor for key, tensor in parts.items() if tensor is not None}


class PairInput(NamedTuple):
    """The input of a draft head's first linear: cat(rms_norm(table[token_ids]), rms_norm(hidden))."""

    table: Tensor
    """[vocab, E], the embedding."""
    table_norm: Tensor | None
    """[E]; None for no norm."""
    hidden_norm: Tensor | None
    """[hidden size]; None for no norm."""
    eps: float
    """The eps of both norms."""

    def rows(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the input for token_ids int64 [T] and hidden [T, hidden size]."""
        embedded = normed(functional.embedding(token_ids, self.table), self.table_norm, self.eps)
        return torch.cat((embedded, normed(hidden, self.hidden_norm, self.eps)), dim=-1)


def normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Return rms_norm of x [..., size] in the dtype of x, or x itself if norm is None.

    With a norm in float32 everything is computed in float32, and rounded once.
    """
    return x if norm is None else functional.rms_norm(x.to(norm.dtype), (x.shape[-1],), norm, eps).to(x.dtype)


def dequantised(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an FP8 matrix times its scales, rounded once to `dtype`: [out, in]."""
    groups, rows = scale.shape
    values = matrix.to(scale.dtype).view(rows, groups, -1) * scale.t().unsqueeze(-1)
    return values.view(matrix.shape).to(dtype)


def quantised(matrix: Tensor, group: int | None = None) -> Weight:
    """Return a matrix as FP8. Each row has one scale per `group` columns, by default one in all.

    The largest absolute value under each scale becomes 448, the largest value of e4m3.
    """
    rows, columns = matrix.shape
    parts = matrix.float().view(rows, -1, group or columns)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return Weight((parts / scale).to(FP8).view(rows, columns), scale=scale.squeeze(-1).t().contiguous())


def product(x: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T + bias."""
    matrix = weight.matrix if weight.scale is None else dequantised(weight.matrix, weight.scale, x.dtype)
    return functional.linear(x, matrix, weight.bias)


def linear_fake(x: Tensor, norm: Norm | None, weight: Weight, residual: Tensor | None = None) -> Tensor:
    """Return the shape and dtype of `norm_linear`'s result."""
    return x.new_empty(x.shape[0], weight.matrix.shape[0])


@op(fake=linear_fake)
def norm_linear(x: Tensor, norm: Norm | None, weight: Weight, residual: Tensor | None = None) -> Tensor:
    """Return rms_norm(x) @ weight.T + bias + residual, [T, out] in the dtype of x [T, in]. None leaves a part out."""
    out = product(x if norm is None else normed(x, *norm), weight)
    return out if residual is None else residual + out

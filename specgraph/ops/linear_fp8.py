"""Linears over FP8 weights (e4m3) with scales: the ops of `specgraph.ops.linear` for quantised checkpoints.

Results are those of dequantised weights up to rounding: activations are not quantised. A device reads half as many
bytes as in bfloat16.

`weight` is float8_e4m3fn [out, in]. `scale` is float32 [groups, out]: each row of `weight` has one scale for every
in / groups of its columns. One group is a scale per row; a checkpoint with one scale per tensor, or per block of rows,
repeats it for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.linear import gate_up_fake, linear_fake, norm_gate_up, norm_linear, pair_fake, pair_linear

FP8 = torch.float8_e4m3fn


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` times its scales, rounded once to `dtype`: [out, in]."""
    groups, rows = scale.shape
    values = weight.to(scale.dtype).view(rows, groups, -1) * scale.t().unsqueeze(-1)
    return values.view(weight.shape).to(dtype)


def quantised(weight: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """`weight` [out, in] as FP8 and its scales, the largest value of each row and `group` columns at 448, e4m3's
    largest; all columns by default."""
    rows, columns = weight.shape
    parts = weight.float().view(rows, -1, group or columns)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (parts / scale).to(FP8).view(rows, columns), scale.squeeze(-1).t().contiguous()


@op(fake=linear_fake)
def norm_linear_fp8(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`norm_linear` over an FP8 weight.

    Args:
        x: [T, in], in the model's dtype; norm, eps, bias and residual as in `norm_linear`.
        weight, scale: see above.

    Returns:
        [T, out] in the dtype of x.
    """
    return norm_linear.reference(x, norm, eps, dequantised(weight, scale, x.dtype), bias, residual)


@op(fake=gate_up_fake)
def norm_gate_up_fp8(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`norm_gate_up` over an FP8 weight.

    Args:
        x, norm, eps, bias: as in `norm_gate_up`.
        weight, scale: see above; gate rows first.

    Returns:
        [T, out / 2] in the dtype of x.
    """
    return norm_gate_up.reference(x, norm, eps, dequantised(weight, scale, x.dtype), bias)


@op(fake=pair_fake)
def pair_linear_fp8(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`pair_linear` over an FP8 weight.

    Args:
        token_ids, table, table_norm, hidden, hidden_norm, eps, bias: as in `pair_linear`; the table is not quantised.
        weight, scale: see above.

    Returns:
        [T, out] in the dtype of hidden.
    """
    dense = dequantised(weight, scale, hidden.dtype)
    return pair_linear.reference(token_ids, table, table_norm, hidden, hidden_norm, eps, dense, bias)

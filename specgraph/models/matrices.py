"""Products with a model's matrices, which are stored in the model's dtype, or as FP8 with scales beside them.

`scale` is None, or float32 as `specgraph.ops.linear_fp8` describes it; `weight` is float8_e4m3fn then. Where the
device has a fused op, it is used, so a device's own kernels apply to every model.
"""

from __future__ import annotations

from torch import Tensor

from specgraph import ops


def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias + residual; see `ops.norm_linear`."""
    if scale is None:
        return ops.norm_linear(x, norm, eps, weight, bias, residual)
    return ops.norm_linear_fp8(x, norm, eps, weight, scale, bias, residual)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out]."""
    return norm_linear(x, None, 0.0, weight, bias, None, scale)


def norm_gate_up(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """silu(gate) * up with (gate | up) = rms_norm(x) @ weight.T + bias; see `ops.norm_gate_up`."""
    if scale is None:
        return ops.norm_gate_up(x, norm, eps, weight, bias)
    return ops.norm_gate_up_fp8(x, norm, eps, weight, scale, bias)


def pair_linear(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias; see `ops.pair_linear`."""
    if scale is None:
        return ops.pair_linear(token_ids, table, table_norm, hidden, hidden_norm, eps, weight, bias)
    return ops.pair_linear_fp8(token_ids, table, table_norm, hidden, hidden_norm, eps, weight, scale, bias)

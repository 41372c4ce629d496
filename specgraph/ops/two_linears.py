"""Two linears of a decoder layer with the residual sum and the norm that lie between them.

Each reference is the composition of the single ops in `specgraph.ops.linear`. As one op a device may add and
normalise without a kernel of its own: rows that are divided by their root mean square after the second product do not
wait for it before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.linear import norm_gate_up, norm_linear


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, next_weight: Tensor,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], next_weight.shape[0])


@op(fake=_linear_fake)
def linear_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """total = x @ weight.T + bias + residual, and rms_norm(total) @ next_weight.T + next_bias.

    Args:
        x: [T, in].
        weight: [size, in]; bias: [size].
        residual: [T, size].
        norm: [size]; eps: of the norm.
        next_weight: [out, size]; next_bias: [out].

    Returns:
        total [T, size] and the second product [T, out], in the dtype of x.
    """
    total = norm_linear.reference(x, None, 0.0, weight, bias, residual)
    return total, norm_linear.reference(total, norm, eps, next_weight, next_bias)


def _gate_up_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, gate_up: Tensor,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], gate_up.shape[0] // 2)


@op(fake=_gate_up_fake)
def linear_norm_gate_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    gate_up: Tensor,
    gate_up_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """total = x @ weight.T + bias + residual, and silu(gate) * up of (gate | up) = rms_norm(total) @ gate_up.T + bias.

    Args:
        x, weight, bias, residual, norm, eps: as in `linear_norm_linear`.
        gate_up: [2 * inner, size], gate rows first; gate_up_bias: [2 * inner].

    Returns:
        total [T, size] and the gated product [T, inner], in the dtype of x.
    """
    total = norm_linear.reference(x, None, 0.0, weight, bias, residual)
    return total, norm_gate_up.reference(total, norm, eps, gate_up, gate_up_bias)

"""Two linears of a decoder layer with the residual sum and the norm that lie between them.

Each reference is the composition of the single ops in `specgraph.ops.linear`. As one op a device may add and
normalise without a kernel of its own: rows that are divided by their root mean square after the second product do not
wait for it before.
"""

from __future__ import annotations

from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.linear import Norm, Weight, norm_gate_up, norm_linear


def _linear_fake(x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape[0], following.matrix.shape[0])


@op(fake=_linear_fake)
def linear_norm_linear(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    """total = x @ weight.T + bias + residual, and rms_norm(total) @ following.T + its bias.

    Args:
        x: [T, in].
        weight: [size, in].
        residual: [T, size].
        following: [out, size].

    Returns:
        total [T, size] and the second product [T, out], in the dtype of x.
    """
    total = norm_linear.reference(x, None, weight, residual)
    return total, norm_linear.reference(total, norm, following)


def _gate_up_fake(x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape[0], following.matrix.shape[0] // 2)


@op(fake=_gate_up_fake)
def linear_norm_gate_up(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    """total = x @ weight.T + bias + residual, and `norm_gate_up` of it.

    Args:
        x, weight, residual: as in `linear_norm_linear`.
        following: [2 * inner, size], gate rows first.

    Returns:
        total [T, size] and the gated product [T, inner], in the dtype of x.
    """
    total = norm_linear.reference(x, None, weight, residual)
    return total, norm_gate_up.reference(total, norm, following)

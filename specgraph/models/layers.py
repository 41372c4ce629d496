"""The tensor operations that every model here is built from: the one place where fused kernels can step in."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids int64 [T], weight [vocab, H] -> [T, H]."""
    return functional.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; half precisions are normalised in float32 inside."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised sum, and the sum: what every block boundary of a pre-norm decoder needs."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * I], gate in the first half and up in the second -> silu(gate) * up [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up

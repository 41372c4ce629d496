"""The tensor operations that every model here is built from: the one place where fused kernels step in."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from specgraph.kernels import greedy_head, norm_gate_up, norm_linear, pair_linear

__all__ = ["embedding", "greedy_head", "linear", "norm_gate_up", "norm_linear", "pair_linear", "rms_norm"]


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids int64 [T], weight [vocab, H] -> [T, H]."""
    return functional.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out]."""
    return norm_linear(x, None, 0.0, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; half precisions are normalised in float32 inside."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)

"""The tensor operations that every model here is built from: the one place where fused kernels can step in."""

from __future__ import annotations

import torch
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


def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias + residual: x [T, in], weight [out, in] -> [T, out]; no norm where it is None."""
    out = linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    return out if residual is None else residual + out


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up with (gate | up) = rms_norm(x) @ weight.T + bias: x [T, in], weight [2 * I, in] -> [T, I]."""
    gate, up = norm_linear(x, norm, eps, weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def pair_linear(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The way into a draft head: cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias.

    token_ids int64 [T], table [vocab, E], hidden [T, H], weight [out, E + H] -> [T, out]; no norm where it is None.
    """
    embedded = embedding(token_ids, table)
    if table_norm is not None:
        embedded = rms_norm(embedded, table_norm, eps)
    if hidden_norm is not None:
        hidden = rms_norm(hidden, hidden_norm, eps)
    return linear(torch.cat((embedded, hidden), dim=-1), weight, bias)

"""Ops of models' linears that do more than `specgraph.ops.norm_linear`, and the op of a rank's part of the embedding.

Two linears with the residual sum and the norm between them are one op. A device may then divide rows by their root mean
square after the second product, without a kernel between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.library import op
from specgraph.ops.linear import Norm, PairInput, Weight, linear_fake, norm_linear, product


def _gate_up_fake(x: Tensor, norm: Norm | None, weight: Weight) -> Tensor:
    return x.new_empty(x.shape[0], weight.matrix.shape[0] // 2)


@op(fake=_gate_up_fake)
def norm_gate_up(x: Tensor, norm: Norm | None, weight: Weight) -> Tensor:
    """Return silu(gate) * up with (gate | up) = rms_norm(x) @ weight.T + bias: [T, inner] in the dtype of x [T, in].

    weight is [2 * inner, in], gate rows first. If `norm` is None, x is not normalised.
    """
    gate, up = norm_linear.reference(x, norm, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _linear_norm_linear_fake(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), linear_fake(x, norm, following)


@op(fake=_linear_norm_linear_fake)
def linear_norm_linear(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    """Return total = x @ weight.T + bias + residual, and rms_norm(total) @ following.T + its bias.

    x is [T, in], weight [size, in], residual [T, size], following [out, size]. The results are [T, size] and [T, out],
    in the dtype of x.
    """
    total = norm_linear.reference(x, None, weight, residual)
    return total, norm_linear.reference(total, norm, following)


def _linear_norm_gate_up_fake(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), _gate_up_fake(x, norm, following)


@op(fake=_linear_norm_gate_up_fake)
def linear_norm_gate_up(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, following: Weight
) -> tuple[Tensor, Tensor]:
    """Return total as `linear_norm_linear` does, and `norm_gate_up` of total, [T, inner].

    following is [2 * inner, size], gate rows first.
    """
    total = norm_linear.reference(x, None, weight, residual)
    return total, norm_gate_up.reference(total, norm, following)


def _pair_fake(token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.matrix.shape[0])


@op(fake=_pair_fake)
def pair_linear(token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
    """Return the first linear of a draft head: cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias.

    token_ids is int64 [T], hidden [T, H], weight [out, E + H]. The result is [T, out], in the dtype of hidden.
    """
    return product(pair.rows(token_ids, hidden), weight)


def _embed_fake(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    return table.new_empty(*token_ids.shape, table.shape[1])


@op(fake=_embed_fake)
def embed_part(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Return table[token_ids - first_id], [T, E], for a rank's part of the embedding.

    The row of another rank's token is zeros, so that the sum over ranks is the embedding.
    """
    row = token_ids - first_id
    inside = (row >= 0) & (row < table.shape[0])
    return torch.where(inside[:, None], table[torch.where(inside, row, 0)], 0)

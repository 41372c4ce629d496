"""Ops that begin with an embedding: the first linear of a draft head, and one rank's part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.linear import PairInput, Weight, product


def _pair_fake(token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.matrix.shape[0])


@op(fake=_pair_fake)
def pair_linear(token_ids: Tensor, hidden: Tensor, pair: PairInput, weight: Weight) -> Tensor:
    """Return the first linear of a draft head: cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias.

    token_ids is int64 [T], hidden [T, H], weight [out, E + H]; the result [T, out] in the dtype of hidden.
    """
    return product(pair.rows(token_ids, hidden), weight)


def _embed_fake(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    return table.new_empty(*token_ids.shape, table.shape[1])


@op(fake=_embed_fake)
def embed_part(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Return table[token_ids - first_id] [T, E] for a rank's part of the embedding; zeros for tokens of other ranks, so
    that a sum over the ranks is whole.
    """
    row = token_ids - first_id
    inside = (row >= 0) & (row < table.shape[0])
    return torch.where(inside[:, None], table[torch.where(inside, row, 0)], 0)

"""The exchanges of ranks that split a model (`TensorParallel`), as functions of the model's parts.

For `WHOLE`, a model that is not split, each function is the plain op.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.ops.linear import Weight
from specgraph_models import ops as model_ops
from specgraph_models.parallel import WHOLE, TensorParallel


def row_parallel(x: Tensor, weight: Weight, residual: Tensor | None, ranks: TensorParallel) -> Tensor:
    """Return x @ weight.T + bias + residual. x [T, columns] and weight [out, columns] have this rank's columns.

    The first rank adds bias and residual [T, out] before the all-reduce, so that no op follows it.
    """
    if ranks.size == 1:
        return ops.norm_linear(x, None, weight, residual)
    if ranks.rank:
        weight, residual = weight._replace(bias=None), None
    out = ops.norm_linear(x, None, weight, residual)
    ops.all_reduce(out, ranks.group)
    return out


def all_rows(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the rows that a rank's experts run over: x [T, size], or the rows of all data parallel ranks.

    The latter are [data parallel ranks * T, size].
    """
    experts = ranks.experts
    if experts is None or experts.data_size == 1:
        return x
    return ops.all_gather(x, experts.data_group, experts.data_size)


def add_experts(partial: Tensor, ranks: TensorParallel) -> Tensor:
    """Sum the results of all ranks' experts for `all_rows`. Return the sum for this rank's own rows, [T, size]."""
    experts = ranks.experts
    if experts is None:
        if ranks.size > 1:
            ops.all_reduce(partial, ranks.group)
        return partial
    ops.all_reduce(partial, experts.group)
    rows = partial.shape[0] // experts.data_size
    return partial[experts.data_rank * rows : (experts.data_rank + 1) * rows]


def embedding(
    token_ids: Tensor, weight: Tensor, ranks: TensorParallel = WHOLE, vocab_size: int | None = None
) -> Tensor:
    """Return the embeddings [T, hidden_size] of token_ids, int64 [T].

    weight: [vocab_size, hidden_size], or this rank's rows of it.
    """
    rows = weight.shape[0]
    if vocab_size is None or rows == vocab_size:
        return functional.embedding(token_ids, weight)
    out = model_ops.embed_part(token_ids, weight, ranks.rank * rows)
    ops.all_reduce(out, ranks.group)
    return out


def table_rows(token_ids: Tensor, weight: Tensor, ranks: TensorParallel, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return ids and a table for an op that looks tokens up itself.

    A whole table and its ids are returned unchanged. For a split one: the tokens' embeddings, and ids 0 to T - 1.
    """
    if weight.shape[0] == vocab_size:
        return token_ids, weight
    looked_up = embedding(token_ids, weight, ranks, vocab_size)
    return torch.arange(token_ids.shape[0], device=token_ids.device), looked_up

"""The end of one draft step and the beginning of the next, for steps of one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.library import op
from specgraph.ops.linear import greedy_head, normed
from specgraph.ops.slots import advance


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    table, hidden = args[14], args[16]
    return hidden.new_empty(hidden.shape[0], table.shape[1] + hidden.shape[1])


@op(writes=("draft_step", "token_ids", "draft_token_ids", "seq_lens", "positions", "slot_mapping"), fake=_fake)
def greedy_next_step(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    draft_to_target: Tensor | None,
    draft_step: Tensor,
    token_ids: Tensor,
    draft_token_ids: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    hidden_eps: float,
) -> Tensor:
    """`greedy_head`, then `advance`, then the input of the next step's first linear, see `pair_linear`.

    Args:
        x, norm, eps, weight, draft_to_target, draft_step, token_ids, draft_token_ids: as in `greedy_head`; `draft_step`
            is the column to write, and 1 is added to it.
        seq_lens, positions, slot_mapping, block_table, max_model_len, block_size: as in `advance`.
        table, table_norm, hidden, hidden_norm: as in `pair_linear`; hidden_eps: of both norms.

    Returns:
        cat(rms_norm(table[token_ids]), rms_norm(hidden)): [R, E + H] in the dtype of hidden.
    """
    greedy_head.reference(x, norm, eps, weight, draft_to_target, draft_step, token_ids, draft_token_ids)
    advance.reference(seq_lens, positions, slot_mapping, draft_step, block_table, max_model_len, block_size)
    embedded = normed(functional.embedding(token_ids, table), table_norm, hidden_eps)
    return torch.cat((embedded, normed(hidden, hidden_norm, hidden_eps)), dim=-1)

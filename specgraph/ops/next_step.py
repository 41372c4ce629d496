"""The end of one draft step and the beginning of the next, for steps of one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.draft_sampling import Drafts, Head, draft_from_hidden
from specgraph.ops.library import op
from specgraph.ops.linear import normed
from specgraph.ops.slots import advance


def _fake(
    x: Tensor, head: Head, drafts: Drafts, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor,
    block_table: Tensor, max_model_len: int, block_size: int, table: Tensor, table_norm: Tensor | None, hidden: Tensor,
    *args: Any,
) -> Tensor:  # fmt: skip
    return hidden.new_empty(hidden.shape[0], table.shape[1] + hidden.shape[1])


@op(
    writes=("drafts.draft_step", "drafts.token_ids", "drafts.draft_token_ids", "seq_lens", "positions", "slot_mapping"),
    fake=_fake,
)
def greedy_next_step(
    x: Tensor,
    head: Head,
    drafts: Drafts,
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
    """`draft_from_hidden`, then `advance`, then the input of the next step's first linear, see `pair_linear`.

    Args:
        x, head, drafts: as in `draft_from_hidden`; 1 is added to `draft_step`.
        seq_lens, positions, slot_mapping, block_table, max_model_len, block_size: as in `advance`.
        table, table_norm, hidden, hidden_norm: as in `pair_linear`; hidden_eps: of both norms.

    Returns:
        cat(rms_norm(table[token_ids]), rms_norm(hidden)): [R, E + H] in the dtype of hidden.
    """
    assert drafts.draft_step is not None
    assert drafts.token_ids is not None
    draft_from_hidden.reference(x, head, drafts)
    advance.reference(seq_lens, positions, slot_mapping, drafts.draft_step, block_table, max_model_len, block_size)
    embedded = normed(functional.embedding(drafts.token_ids, table), table_norm, hidden_eps)
    return torch.cat((embedded, normed(hidden, hidden_norm, hidden_eps)), dim=-1)

"""The KV slots of positions, and ops that move a captured pass's metadata to the next draft step, in place.

Two rules keep padded rows harmless. A request with seq_len 0 is inert, and stays inert. A position at or past
max_model_len, or in the null block, has slot -1 and is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op

NULL_SLOT = -1
"""The slot of rows that are never written: padded rows, and rows at positions past max_model_len."""

NULL_BLOCK = 0
"""The block that no request owns. Block tables are padded with it, so reading past a request's end is harmless."""


def slots_of(positions: Tensor, block_table: Tensor, valid: Tensor, max_model_len: int, block_size: int) -> Tensor:
    """Return the KV slots, int64 [R, query_len], of positions of the same shape, which need not be clamped.

    A position has NULL_SLOT if `valid` (bool [R, query_len] or [R, 1]) is False, if it is past max_model_len, or if its
    block is the null block.
    """
    inside = valid & (positions < max_model_len) & (positions >= 0)
    block = blocks_of(positions, block_table, max_model_len, block_size)
    return torch.where(inside & (block != NULL_BLOCK), block * block_size + positions % block_size, NULL_SLOT)


def count_rows_without_block(
    rows_without_block: Tensor,
    first_positions: Tensor,
    counts: Tensor,
    block_table: Tensor,
    most: int,
    max_model_len: int,
    block_size: int,
) -> None:
    """Count the rows with a position below max_model_len in the null block, see `Drafter.rows_without_block`.

    Args:
        rows_without_block: int64 [1]: the count is added to it.
        first_positions, counts: int64 [R]: the position of each request's first row, and its rows, at most `most`.
        block_table: int32 [R, max_blocks].
    """
    offset = torch.arange(most, device=counts.device)
    position = first_positions[:, None] + offset
    written = (offset < counts[:, None]) & (position < max_model_len) & (position >= 0)
    block = blocks_of(position, block_table, max_model_len, block_size)
    rows_without_block.add_((written & (block == NULL_BLOCK)).sum())


def blocks_of(positions: Tensor, block_table: Tensor, max_model_len: int, block_size: int) -> Tensor:
    index = (positions.clamp(0, max_model_len - 1) // block_size).clamp(max=block_table.shape[1] - 1)
    return block_table.gather(1, index).long()


@op(writes=("seq_lens", "positions", "slot_mapping", "draft_step"))
def advance(
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    draft_step: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
) -> None:
    """Move the one row of every live request one token forward, in place. Inert requests stay inert.

    Args:
        seq_lens: int32 [R]: 1 is added to each that is not 0.
        positions: int64 [R], written: seq_len - 1, at most max_model_len - 1.
        slot_mapping: int64 [R], written.
        draft_step: int64 [1]: 1 is added.
        block_table: int32 [R, max_blocks].
        max_model_len, block_size: in tokens.
    """
    live = seq_lens > 0
    seq_lens.add_(live)
    position = seq_lens.long() - 1
    slots = slots_of(position[:, None], block_table, live[:, None], max_model_len, block_size)
    slot_mapping.copy_(slots[:, 0])
    positions.copy_(position.clamp(0, max_model_len - 1))
    draft_step.add_(1)


@op(writes=("token_ids", "seq_lens", "draft_step"))
def shift_token_ids(token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor) -> None:
    """Prepare the next draft step of a drafter with one module per draft step: each row takes the next row's token.

    The last accepted row takes the latest draft token. Rows past it may hold anything: they are never selected, and no
    accepted row sees them.

    Args:
        token_ids: int64 [R * query_len], written.
        last_rows: int64 [R]: the row of each request's last accepted token.
        latest: int64 [R]: the draft token of the draft step before.
        seq_lens: int32 [R]: 1 is added to each that is not 0. Sampling derives the next draft token's position from it.
        draft_step: int64 [1]: 1 is added.
    """
    requests = last_rows.shape[0]
    rows = token_ids.view(requests, -1)
    column = torch.arange(rows.shape[1], device=rows.device)
    last = last_rows[:, None] - torch.arange(requests, device=rows.device)[:, None] * rows.shape[1]
    following = torch.cat([rows[:, 1:], rows[:, -1:]], dim=1)
    token_ids.copy_(torch.where(column == last, latest[:, None], following).flatten())
    seq_lens.add_(seq_lens > 0)
    draft_step.add_(1)

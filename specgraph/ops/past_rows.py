"""Rows that an MTP drafter with several modules computes once more, in each propose, with the tokens now known.

Module i takes at position p the token i + 1 places further. At the end of the text that token is a draft, so the keys
of the last K - 1 positions are those of drafted tokens until a later pass computes them again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import Once
from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK, blocks_of


class PastRows(NamedTuple):
    """The last H positions of each KV block that were written: position p is entry p % block_size % H of its block.

    H is K - 1, or the block size where that is less. An entry belongs to the block, as keys and values do: requests
    that share a block share it, and an engine that copies a block's KV copies it too (else its last rows keep the keys
    that they have). An entry that holds another position than is looked for counts as none.
    """

    token_ids: Once
    """int64 [num_blocks, H]: the token after the position."""
    positions: Once
    """int64 [num_blocks, H]: -1 for none."""
    hidden: Once
    """[num_blocks, H, hidden_size]: the target's hidden state there, as the first module takes it."""


def find_past_rows(
    positions: Tensor, wanted: Tensor, block_table: Tensor, past: PastRows, max_model_len: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return which of the wanted rows were kept, without a gap up to the last wanted one, and their entries in `past`.

    Args:
        positions: int64 [R, L], ascending by 1.
        wanted: bool [R, L].
        block_table: int32 [R, max_blocks].
        max_model_len, block_size: in tokens.

    Returns:
        bool [R, L]; int64 [R, L], of num_blocks * H entries.
    """
    held = past.positions.shape[1]
    block = blocks_of(positions, block_table, max_model_len, block_size)
    entry = block * held + positions % block_size % held
    found = wanted & (block != NULL_BLOCK) & (past.positions.flatten()[entry] == positions)
    offset = torch.arange(positions.shape[1], device=positions.device)
    gap_behind = ((wanted & ~found)[:, None] & (offset > offset[:, None])).any(dim=2)
    return found & ~gap_behind, entry


@op(writes=("past",))
def keep_rows(
    token_ids: Tensor, hidden: Tensor, positions: Tensor, slot_mapping: Tensor, past: PastRows, block_size: int
) -> None:
    """Keep what the rows of a pass take, for `begin_rows`: of each KV block the last H positions.

    Args:
        token_ids: int64 [T], the token after each row's position.
        hidden: [T, hidden_size], the hidden states that the first module takes.
        positions: int64 [T], ascending by 1 within a request.
        slot_mapping: int64 [T], the KV slots of the rows; a row with a negative slot is not kept.
        block_size: in tokens; H is at most that.
    """
    held, block = past.positions.shape[1], slot_mapping // block_size
    later = torch.cat([slot_mapping[held:], torch.full_like(slot_mapping[:held], -1)])  # the next row of the same entry
    taken = (slot_mapping >= 0) & ~((later >= 0) & (later // block_size == block))
    # A row that is not kept writes entry 0 back as it was: it is of the null block, which no live row writes.
    entry = torch.where(taken, block * held + slot_mapping % block_size % held, 0)
    for values, into in ((token_ids, past.token_ids), (positions, past.positions)):
        flat = into.view(-1)
        flat.index_put_((entry,), torch.where(taken, values, flat[entry]))
    states = past.hidden.view(-1, past.hidden.shape[2])
    states.index_put_((entry,), torch.where(taken[:, None], hidden, states[entry]))

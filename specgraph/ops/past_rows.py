"""Past rows: an MTP drafter with several modules computes them again in each propose, with the tokens now known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import Once
from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK, blocks_of


class PastRows(NamedTuple):
    """The kept rows: of each KV block, the last H positions that were written.

    H is min(K - 1, block_size). Position p is entry p % block_size % H of its block. An entry belongs to the block, as
    keys and values do. Requests that share a block share its entries. A host engine that copies a block's KV should
    copy them too: otherwise the last rows in the copy keep their keys. A reader ignores an entry of another position.
    """

    token_ids: Once
    """int64 [num_blocks, H]: the token after the position."""
    positions: Once
    """int64 [num_blocks, H]: -1 if the entry is empty."""
    hidden: Once
    """[num_blocks, H, hidden_size]: the target's hidden state at the position, as the first module takes it."""


def find_past_rows(
    positions: Tensor, wanted: Tensor, block_table: Tensor, past: PastRows, max_model_len: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return which wanted rows can be used, and their entries in `past`.

    A wanted row can be used if it was kept, and so was every later wanted row.

    Args:
        positions: int64 [R, L], ascending by 1.
        wanted: bool [R, L].
        block_table: int32 [R, max_blocks].
        max_model_len, block_size: in tokens.

    Returns:
        bool [R, L]; int64 [R, L], indices into the num_blocks * H entries.
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
    """Keep the inputs of a pass's rows for a later `begin_rows`: of each KV block, the last H positions.

    Args:
        token_ids: int64 [T], the token after each row's position.
        hidden: [T, hidden_size], the hidden states that the first module takes.
        positions: int64 [T], ascending by 1 within a request.
        slot_mapping: int64 [T], the KV slots of the rows; a row with a negative slot is not kept.
        block_size: in tokens; H is at most this.
    """
    held, block = past.positions.shape[1], slot_mapping // block_size
    later = torch.cat([slot_mapping[held:], torch.full_like(slot_mapping[:held], -1)])  # the next row of the same entry
    taken = (slot_mapping >= 0) & ~((later >= 0) & (later // block_size == block))
    # A row that is not kept writes the contents of entry 0 back to it. No live row writes it: it is in the null block.
    entry = torch.where(taken, block * held + slot_mapping % block_size % held, 0)
    for values, into in ((token_ids, past.token_ids), (positions, past.positions)):
        flat = into.view(-1)
        flat.index_put_((entry,), torch.where(taken, values, flat[entry]))
    states = past.hidden.view(-1, past.hidden.shape[2])
    states.index_put_((entry,), torch.where(taken[:, None], hidden, states[entry]))

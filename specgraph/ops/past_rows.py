"""Rows that an MTP drafter with several modules computes once more, in each propose, with the tokens now known.

Module i takes at position p the token i + 1 places further. At the end of the text that token is a draft, so the keys
of the last K - 1 positions are those of drafted tokens until a later pass computes them again. What such a row takes,
its hidden state and the token after it, is kept beside the KV blocks: for each block the last H positions that were
written there, position p in entry p % block_size % H. H is K - 1, or the block size where that is less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK, blocks_of, count_rows_without_block, slots_of


@op(
    writes=(
        "token_ids", "hidden", "positions", "slot_mapping", "seq_lens", "last_rows", "step_seq_lens", "draft_step",
        "rows_without_block",
    )
)  # fmt: skip
def begin_modules(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    round_hidden: Tensor,
    *,
    past_token_ids: Tensor,
    past_positions: Tensor,
    past_hidden: Tensor,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    hidden: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    last_rows: Tensor,
    step_seq_lens: Tensor,
    draft_step: Tensor,
    rows_without_block: Tensor | None = None,
) -> None:
    """Fill the rows of a drafter with one module per step: past rows of each request, then those of its round.

    There are L = query_len + K - 1 rows per request, from position begin = max(start - (K - 1), 0) on. Rows before
    `start` take what was kept of them (`keep_rows`); one that was not kept, and all before it, are not computed again.
    Row start + i takes sampled_token_ids[i], the token after its position, if i < num_sampled. All other rows take
    zeros, and have no slot: they are never selected, and no row that has one sees them.

    Args:
        sampled_token_ids: int64 [R, query_len]: accepted draft tokens, then the token sampled by the target, then
            anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of row 0 in the target's pass.
        block_table: int32 [R, max_blocks].
        round_hidden: [R * query_len, hidden_size], the combined hidden states of the round's rows.
        past_token_ids, past_positions: int64 [num_blocks, H]; past_hidden: [num_blocks, H, hidden_size]: what was kept.
        max_model_len, block_size: in tokens.
        token_ids, positions, slot_mapping: int64 [R * L], written.
        hidden: [R * L, hidden_size], written.
        seq_lens: int32 [R], written: begin + L, or 0 for inert requests.
        last_rows: int64 [R], written: the row of the last accepted token, of R * L.
        step_seq_lens: int32 [R], written: start + num_sampled, or 0 for inert requests.
        draft_step: int64 [1], set to 0.
        rows_without_block: int64 [1], added to: rows of the round whose token has no KV block, see
            `count_rows_without_block`; None counts nothing.
    """
    requests, query_len = sampled_token_ids.shape
    rows, kept = token_ids.shape[0] // requests, past_positions.shape[1]
    device = num_sampled.device
    counts = num_sampled[:, None].long()
    live = counts > 0
    begin = (start_positions - (rows - query_len)).clamp(min=0)
    past = (start_positions - begin)[:, None]  # rows before the round's
    offset, request = torch.arange(rows, device=device), torch.arange(requests, device=device)[:, None]
    raw, column = begin[:, None] + offset, offset - past
    block = blocks_of(raw, block_table, max_model_len, block_size)
    entry = block * kept + raw % block_size % kept
    found = live & (column < 0) & (block != NULL_BLOCK) & (past_positions.flatten()[entry] == raw)
    missing = (column < 0) & ~found
    found = found & ~(missing[:, None] & (offset > offset[:, None])).any(dim=2)
    known = live & (column >= 0) & (column < counts)
    own = column.clamp(0, query_len - 1)
    sampled = torch.where(known, sampled_token_ids.gather(1, own), 0)
    token_ids.copy_(torch.where(found, past_token_ids.flatten()[entry], sampled).flatten())
    states = torch.where(known[:, :, None], round_hidden[request * query_len + own], 0.0)
    hidden.copy_(torch.where(found[:, :, None], past_hidden.flatten(0, 1)[entry], states).flatten(0, 1))
    positions.copy_(torch.where(live, raw, 0).clamp(0, max_model_len - 1).flatten())
    slot_mapping.copy_(slots_of(raw, block_table, found | known, max_model_len, block_size).flatten())
    seq_lens.copy_(torch.where(num_sampled > 0, begin + rows, 0))
    last_rows.copy_((request * rows + (past + counts - 1).clamp(min=0))[:, 0])
    step_seq_lens.copy_(torch.where(num_sampled > 0, start_positions + num_sampled, 0))
    draft_step.zero_()
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start_positions, num_sampled, block_table, query_len, 0, max_model_len, block_size
        )


@op(writes=("past_token_ids", "past_positions", "past_hidden"))
def keep_rows(
    token_ids: Tensor,
    hidden: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    past_token_ids: Tensor,
    past_positions: Tensor,
    past_hidden: Tensor,
    block_size: int,
) -> None:
    """Keep what the rows of a pass take, for `begin_modules`: of each KV block the last H positions.

    Args:
        token_ids: int64 [T], the token after each row's position.
        hidden: [T, hidden_size], the hidden states that the first module takes.
        positions: int64 [T], ascending by 1 within a request.
        slot_mapping: int64 [T], the KV slots of the rows; a row with a negative slot is not kept.
        past_token_ids, past_positions: int64 [num_blocks, H], written.
        past_hidden: [num_blocks, H, hidden_size], written.
        block_size: in tokens; H is at most that.
    """
    kept, block = past_positions.shape[1], slot_mapping // block_size
    later = torch.cat([slot_mapping[kept:], torch.full_like(slot_mapping[:kept], -1)])  # the next row of the same entry
    taken = (slot_mapping >= 0) & ~((later >= 0) & (later // block_size == block))
    # A row that is not kept writes entry 0 back as it was: it is of the null block, which no live row writes.
    entry = torch.where(taken, block * kept + slot_mapping % block_size % kept, 0)
    for values, into in ((token_ids, past_token_ids), (positions, past_positions)):
        flat = into.view(-1)
        flat.index_put_((entry,), torch.where(taken, values, flat[entry]))
    states = past_hidden.view(-1, past_hidden.shape[2])
    states.index_put_((entry,), torch.where(taken[:, None], hidden, states[entry]))

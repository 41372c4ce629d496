"""The first op of each captured pass: from what a round produced to rows, positions, lengths and KV slots.

One op per kind of pass, inside the graph, so that a whole propose is one launch and the host never reads an accepted
count. As in vLLM's padded drafter batch, rejected rows stay in the batch and are never selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import count_rows_without_block, slots_of


@op(
    writes=(
        "token_ids", "positions", "slot_mapping", "seq_lens", "last_rows", "step_positions", "step_seq_lens",
        "draft_step", "rows_without_block",
    )
)  # fmt: skip
def begin_propose(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    *,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    last_rows: Tensor,
    step_positions: Tensor,
    step_seq_lens: Tensor,
    draft_step: Tensor,
    later_rows: int = 0,
    rows_without_block: Tensor | None = None,
) -> None:
    """Fill the rows of draft step 0 from the target's round, and the metadata that the later steps start from.

    There are query_len = K + 1 rows per request. Row i is at position start + i and holds the token that comes *after*
    that position: sampled_token_ids[i] if i < num_sampled, else a filler token whose row is never selected.

    Args:
        sampled_token_ids: int64 [R, query_len]: accepted draft tokens, then the token sampled by the target, then
            anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of row 0 in the target's pass.
        block_table: int32 [R, max_blocks].
        max_model_len, block_size: in tokens.
        token_ids, positions, slot_mapping: int64 [R * query_len], written.
        seq_lens: int32 [R], written: start + query_len, or 0 for inert requests.
        last_rows: int64 [R], written: the row of the last accepted token.
        step_positions: int64 [R], step_seq_lens: int32 [R], written: metadata of that row, for `advance`.
        draft_step: int64 [1], set to 0.
        later_rows: rows per request that the later steps write, after the last accepted token's.
        rows_without_block: int64 [1], added to: rows whose token has no KV block, see `count_rows_without_block`; None
            counts nothing.
    """
    requests, query_len = sampled_token_ids.shape
    live = num_sampled > 0
    offset = torch.arange(query_len, device=num_sampled.device)
    known = offset < num_sampled[:, None]
    token_ids.copy_(torch.where(known, sampled_token_ids, 0).flatten())
    raw = start_positions[:, None] + offset
    positions.copy_(torch.where(live[:, None], raw, 0).clamp(0, max_model_len - 1).flatten())
    slot_mapping.copy_(slots_of(raw, block_table, live[:, None], max_model_len, block_size).flatten())
    seq_lens.copy_(torch.where(live, start_positions + query_len, 0))
    first_row = torch.arange(0, requests * query_len, query_len, device=num_sampled.device)
    last_rows.copy_(first_row + (num_sampled - 1).clamp(min=0))
    step_seq_lens.copy_(torch.where(live, start_positions + num_sampled, 0))
    step_positions.copy_((step_seq_lens.long() - 1).clamp(0, max_model_len - 1))
    draft_step.zero_()
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start_positions, num_sampled, block_table, query_len, later_rows, max_model_len,
            block_size,
        )  # fmt: skip


@op(writes=("token_ids", "positions", "slot_mapping", "seq_lens"))
def begin_verify(
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    *,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
) -> None:
    """Fill the rows of a verify pass: the last token of each request, then its K draft tokens.

    Args:
        last_token_ids: int64 [R].
        draft_token_ids: int64 [R, K]; K = 0 is plain decoding, and -1 means no draft token (verification rejects it).
        start_positions: int64 [R]: position of the last token; negative makes the request inert.
        block_table: int32 [R, max_blocks].
        max_model_len, block_size: in tokens.
        token_ids, positions, slot_mapping: int64 [R * (K + 1)], written.
        seq_lens: int32 [R], written: start + K + 1, or 0 for inert requests.
    """
    query_len = draft_token_ids.shape[1] + 1
    live = start_positions >= 0
    rows = torch.cat([last_token_ids[:, None], draft_token_ids], dim=1)
    token_ids.copy_(torch.where(live[:, None], rows, 0).clamp(min=0).flatten())
    raw = start_positions[:, None] + torch.arange(query_len, device=live.device)
    positions.copy_(torch.where(live[:, None], raw, 0).clamp(0, max_model_len - 1).flatten())
    slot_mapping.copy_(slots_of(raw, block_table, live[:, None], max_model_len, block_size).flatten())
    seq_lens.copy_(torch.where(live, start_positions + query_len, 0))


@op(
    writes=(
        "context_positions", "context_slots", "token_ids", "positions", "slot_mapping", "seq_lens",
        "rows_without_block",
    )
)  # fmt: skip
def begin_block(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    *,
    mask_token_id: int,
    max_model_len: int,
    block_size: int,
    context_positions: Tensor,
    context_slots: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    rows_without_block: Tensor | None = None,
) -> None:
    """Fill a parallel drafter's context rows and its block of 1 + K rows per request from the target's round.

    There are query_len context rows per request, one per row of the round: row i is at position start + i, and
    rejected rows have no slot. The block begins one position after the last accepted row, with the token that the
    target sampled, followed by K mask tokens.

    Args:
        sampled_token_ids: int64 [R, query_len]: accepted draft tokens, then the token sampled by the target, then
            anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of context row 0.
        block_table: int32 [R, max_blocks].
        mask_token_id: the token of the block's last K rows.
        max_model_len, block_size: in tokens.
        context_positions, context_slots: int64 [R * query_len], written.
        token_ids, positions, slot_mapping: int64 [R * (1 + K)], written.
        seq_lens: int32 [R], written: the block's last position + 1, at most max_model_len; 0 for inert requests.
        rows_without_block: int64 [1], added to: rows whose token has no KV block, see `count_rows_without_block`; None
            counts nothing.
    """
    requests, query_len = sampled_token_ids.shape
    length = positions.shape[0] // requests
    device = num_sampled.device
    live = num_sampled > 0
    offset = torch.arange(query_len, device=device)
    known = offset < num_sampled[:, None]
    raw = start_positions[:, None] + offset
    context_positions.copy_(torch.where(known, raw, 0).clamp(0, max_model_len - 1).flatten())
    context_slots.copy_(slots_of(raw, block_table, known, max_model_len, block_size).flatten())
    latest = sampled_token_ids.gather(1, (num_sampled[:, None].long() - 1).clamp(min=0))
    column = torch.arange(length, device=device)
    token_ids.copy_(torch.where(live[:, None] & (column == 0), latest, mask_token_id).flatten())
    begin = start_positions + num_sampled
    raw = begin[:, None] + column
    positions.copy_(torch.where(live[:, None], raw, 0).clamp(0, max_model_len - 1).flatten())
    slot_mapping.copy_(slots_of(raw, block_table, live[:, None], max_model_len, block_size).flatten())
    # Block rows attend without a causal mask, so the length may end with the model's last position.
    seq_lens.copy_(torch.where(live, (begin + length).clamp(max=max_model_len), 0))
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start_positions, num_sampled, block_table, query_len, length, max_model_len, block_size
        )


@op(
    writes=(
        "token_ids", "positions", "slot_mapping", "seq_lens", "hidden_rows", "draft_rows", "rows_without_block",
    )
)  # fmt: skip
def begin_masked(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    *,
    mask_token_id: int,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    hidden_rows: Tensor,
    draft_rows: Tensor,
    rows_without_block: Tensor | None = None,
) -> None:
    """Fill the rows of a drafter that drafts K tokens in one causal pass (P-EAGLE) from the target's round.

    There are L = query_len + K - 1 rows per request. Row i is at position start + i. Of the first num_sampled rows it
    holds sampled_token_ids[i], the token after its position; of the next K - 1 the mask token. The last L - num_sampled
    - K + 1 rows have no slot: they are never selected, and no row before them sees them.

    Args:
        sampled_token_ids: int64 [R, query_len]: accepted draft tokens, then the token sampled by the target, then
            anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of row 0.
        block_table: int32 [R, max_blocks].
        mask_token_id: the token of masked rows.
        max_model_len, block_size: in tokens.
        token_ids, positions, slot_mapping: int64 [R * L], written.
        seq_lens: int32 [R], written: start + L, or 0 for inert requests.
        hidden_rows: int64 [R * L], written: for each row the row of the round (of R * query_len) whose hidden state it
            takes; R * query_len for the rows that take the mask's.
        draft_rows: int64 [R * K], written: the rows that draft: the last sampled token's and the K - 1 masked ones.
        rows_without_block: int64 [1], added to: rows whose token has no KV block, see `count_rows_without_block`; None
            counts nothing.
    """
    requests, query_len = sampled_token_ids.shape
    length, steps = token_ids.shape[0] // requests, draft_rows.shape[0] // requests
    device = num_sampled.device
    offset, request = torch.arange(length, device=device), torch.arange(requests, device=device)[:, None]
    counts = num_sampled[:, None].long()
    live, known = counts > 0, offset < counts
    sampled = sampled_token_ids[:, offset.clamp(max=query_len - 1)]
    token_ids.copy_(torch.where(known, sampled, mask_token_id).flatten())
    hidden_rows.copy_(torch.where(known, request * query_len + offset, requests * query_len).flatten())
    raw = start_positions[:, None] + offset
    positions.copy_(torch.where(live, raw, 0).clamp(0, max_model_len - 1).flatten())
    kept = live & (offset < counts + steps - 1)
    slot_mapping.copy_(slots_of(raw, block_table, kept, max_model_len, block_size).flatten())
    seq_lens.copy_(torch.where(num_sampled > 0, start_positions + length, 0))
    first = request * length + (counts - 1).clamp(min=0)
    draft_rows.copy_((first + torch.arange(steps, device=device)).flatten())
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start_positions, num_sampled, block_table, query_len, steps - 1, max_model_len,
            block_size,
        )  # fmt: skip


@op(writes=("positions", "slot_mapping", "seq_lens", "last_row"))
def begin_prefill(
    first_position: Tensor,
    num_rows: Tensor,
    block_table: Tensor,
    *,
    max_model_len: int,
    block_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    last_row: Tensor,
) -> None:
    """Fill T rows of one request's prompt, of which the first `num_rows` are real and the others write no KV.

    Args:
        first_position: int64 [1]: position of row 0.
        num_rows: int64 [1]: real rows; 0 makes the pass inert.
        block_table: int32 [1, max_blocks], with null blocks for T tokens past max_model_len.
        max_model_len, block_size: in tokens.
        positions, slot_mapping: int64 [T], written.
        seq_lens: int32 [1], written: first_position + T, because bottom-right causal attention lets row i of T see
            seq_len - T + 1 + i keys, which must be first_position + i + 1 however many rows are padding.
        last_row: int64 [1], written: the last real row.
    """
    rows = positions.shape[0]
    offset = torch.arange(rows, device=positions.device)
    raw = first_position + offset
    positions.copy_(raw.clamp(0, max_model_len - 1))
    known = (offset < num_rows)[None]
    slot_mapping.copy_(slots_of(raw[None], block_table, known, max_model_len, block_size)[0])
    seq_lens.copy_(torch.where(num_rows > 0, first_position + rows, 0))
    last_row.copy_((num_rows - 1).clamp(min=0))

"""The first node of a captured pass: from what the engine hands over to rows, positions, lengths and slots.

One op each for propose and verify, inside the graph, so that a whole propose is one launch and no accepted count is
read on the host. The precedent is vLLM's padded drafter batch: rejected rows stay in the batch and are never selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.library import define
from specgraph.kernels.slots import slots_of


def _begin_propose(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
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
) -> None:
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


_begin_propose_op = define(
    "begin_propose(Tensor sampled_token_ids, Tensor num_sampled, Tensor start_positions, Tensor block_table,"
    " int max_model_len, int block_size, Tensor(a!) token_ids, Tensor(b!) positions, Tensor(c!) slot_mapping,"
    " Tensor(d!) seq_lens, Tensor(e!) last_rows, Tensor(f!) step_positions, Tensor(g!) step_seq_lens,"
    " Tensor(h!) draft_step) -> ()",
    reference=_begin_propose,
)


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
) -> None:
    """Fill step 0's rows and the later steps' starting metadata from the target's round.

    With q = K + 1 rows a request. Row i of a request stands at position start + i and takes the token *after* it,
    which is sampled_token_ids[i] if i < num_sampled, else a filler whose row is never selected.

    Args:
        sampled_token_ids: int64 [R, q]: accepted draft tokens, then the token sampled by the target, then anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of row 0 in the target's pass.
        block_table: int32 [R, max_blocks].
        token_ids, positions, slot_mapping: int64 [R * q], written.
        seq_lens: int32 [R], written: start + q, or 0.
        last_rows: int64 [R], written: the row of the last accepted token.
        step_positions: int64 [R], step_seq_lens: int32 [R], written: metadata of that row, for `advance`.
        draft_step: int64 [1], set to 0.
    """
    _begin_propose_op(
        sampled_token_ids, num_sampled, start_positions, block_table, max_model_len, block_size, token_ids, positions,
        slot_mapping, seq_lens, last_rows, step_positions, step_seq_lens, draft_step,
    )  # fmt: skip


def _begin_verify(
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
) -> None:
    query_len = draft_token_ids.shape[1] + 1
    live = start_positions >= 0
    rows = torch.cat([last_token_ids[:, None], draft_token_ids], dim=1)
    token_ids.copy_(torch.where(live[:, None], rows, 0).clamp(min=0).flatten())
    raw = start_positions[:, None] + torch.arange(query_len, device=live.device)
    positions.copy_(torch.where(live[:, None], raw, 0).clamp(0, max_model_len - 1).flatten())
    slot_mapping.copy_(slots_of(raw, block_table, live[:, None], max_model_len, block_size).flatten())
    seq_lens.copy_(torch.where(live, start_positions + query_len, 0))


_begin_verify_op = define(
    "begin_verify(Tensor last_token_ids, Tensor draft_token_ids, Tensor start_positions, Tensor block_table,"
    " int max_model_len, int block_size, Tensor(a!) token_ids, Tensor(b!) positions, Tensor(c!) slot_mapping,"
    " Tensor(d!) seq_lens) -> ()",
    reference=_begin_verify,
)


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
    """Fill a verify pass: each request's last token, then its K draft tokens.

    Args:
        last_token_ids: int64 [R].
        draft_token_ids: int64 [R, K]; K = 0 is plain decoding, -1 is no draft token (verification rejects it).
        start_positions: int64 [R]: position of the last token; negative makes the request inert.
        block_table: int32 [R, max_blocks].
        token_ids, positions, slot_mapping: int64 [R * (K + 1)], written.
        seq_lens: int32 [R], written.
    """
    _begin_verify_op(
        last_token_ids, draft_token_ids, start_positions, block_table, max_model_len, block_size, token_ids,
        positions, slot_mapping, seq_lens,
    )  # fmt: skip

"""The ops of a parallel drafter: a block of 1 + K rows a request from the target's round, and all K tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import noise
from specgraph.kernels.library import define
from specgraph.kernels.slots import slots_of


def _begin_block(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    mask_token_id: int,
    max_model_len: int,
    block_size: int,
    context_positions: Tensor,
    context_slots: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
) -> None:
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
    # Not causal: every row sees all keys, so the length may end with the model's last position.
    seq_lens.copy_(torch.where(live, (begin + length).clamp(max=max_model_len), 0))


_begin_block_op = define(
    "begin_block(Tensor sampled_token_ids, Tensor num_sampled, Tensor start_positions, Tensor block_table,"
    " int mask_token_id, int max_model_len, int block_size, Tensor(a!) context_positions, Tensor(b!) context_slots,"
    " Tensor(c!) token_ids, Tensor(d!) positions, Tensor(e!) slot_mapping, Tensor(f!) seq_lens) -> ()",
    reference=_begin_block,
)


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
) -> None:
    """Fill a parallel drafter's context rows and its blocks from the target's round.

    With q rows a request in the round and a block of 1 + K. Context row i of a request stands at position start + i;
    rejected rows have no slot. The block begins one position after the last accepted row, with the token that the
    target sampled, and goes on with the mask token.

    Args:
        sampled_token_ids: int64 [R, q]: accepted draft tokens, then the token sampled by the target, then anything.
        num_sampled: int32 [R]: accepted + 1; 0 makes the request inert.
        start_positions: int64 [R]: position of context row 0.
        block_table: int32 [R, max_blocks].
        context_positions, context_slots: int64 [R * q], written.
        token_ids, positions, slot_mapping: int64 [R * (1 + K)], written.
        seq_lens: int32 [R], written: the block's last position + 1, at most max_model_len; 0 for inert requests.
    """
    _begin_block_op(
        sampled_token_ids, num_sampled, start_positions, block_table, mask_token_id, max_model_len, block_size,
        context_positions, context_slots, token_ids, positions, slot_mapping, seq_lens,
    )  # fmt: skip


def _write(draft_ids: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor) -> None:
    ids = draft_ids if draft_to_target is None else draft_ids + draft_to_target[draft_ids]
    draft_token_ids.copy_(ids.view(draft_token_ids.shape))


def _greedy(logits: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor) -> None:
    _write(logits.argmax(dim=-1), draft_to_target, draft_token_ids)


_greedy_op = define(
    "draft_block_greedy(Tensor logits, Tensor? draft_to_target, Tensor(a!) draft_token_ids) -> ()", reference=_greedy
)


def draft_block_greedy(logits: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor) -> None:
    """The most likely token of every masked row.

    Args:
        logits: [R * K, draft_vocab].
        draft_to_target: int64 [draft_vocab] offsets, or None.
        draft_token_ids: int64 [R, K], written.
    """
    _greedy_op(logits, draft_to_target, draft_token_ids)


def _gumbel(
    logits: Tensor,
    draft_to_target: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    num_sampled: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor,
) -> None:
    requests, steps = draft_token_ids.shape
    vocab = logits.shape[-1]
    warm = temperature.repeat_interleave(steps)[:, None]
    sampled = warm > 0
    scaled = logits.float() / torch.where(sampled, warm, 1.0)
    stands = (start_positions + num_sampled)[:, None] + 1 + torch.arange(steps, device=logits.device)
    keys = scaled + noise.gumbel(seeds.repeat_interleave(steps), stands.flatten(), noise.DRAFT, vocab)
    ids = torch.where(sampled, keys, scaled).argmax(dim=-1)
    one_hot = torch.zeros_like(scaled).scatter_(1, ids[:, None], 1.0)
    draft_probs.copy_(torch.where(sampled, torch.softmax(scaled, dim=-1), one_hot).view(requests, steps, vocab))
    _write(ids, draft_to_target, draft_token_ids)


_gumbel_op = define(
    "draft_block_gumbel(Tensor logits, Tensor? draft_to_target, Tensor temperature, Tensor seeds,"
    " Tensor start_positions, Tensor num_sampled, Tensor(a!) draft_token_ids, Tensor(b!) draft_probs) -> ()",
    reference=_gumbel,
)


def draft_block_gumbel(
    logits: Tensor,
    draft_to_target: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    num_sampled: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor,
) -> None:
    """Tokens from softmax(logits / temperature), each row by itself, and the distributions they came from.

    Args:
        logits, draft_to_target, draft_token_ids: as in `draft_block_greedy`.
        temperature: float32 [R]; 0 is greedy, with one-hot distributions.
        seeds: int64 [R].
        start_positions: int64 [R], num_sampled: int32 [R]: as in `begin_block`. Draft token j (from 0) will stand at
            start + num_sampled + 1 + j, which names its noise.
        draft_probs: float32 [R, K, draft_vocab], written.
    """
    _gumbel_op(logits, draft_to_target, temperature, seeds, start_positions, num_sampled, draft_token_ids, draft_probs)

"""Picking draft tokens from logits, greedily or by temperature, and writing them where the next step reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops import noise
from specgraph.ops.library import op


def write_drafts(
    draft_ids: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor
) -> None:
    """Map draft ids [R] to target ids; write them to `token_ids` and to column `draft_step` of `draft_token_ids`."""
    ids = to_target_ids(draft_ids, draft_to_target)
    token_ids.copy_(ids)
    draft_token_ids.index_copy_(1, draft_step, ids[:, None])


def to_target_ids(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Ids in the target's vocabulary. `draft_to_target` holds the offset of each draft id, or is None for equal ids."""
    return draft_ids if draft_to_target is None else draft_ids + draft_to_target[draft_ids]


def sample_rows(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits / temperature), by the Gumbel-max trick.

    Args:
        logits: [N, vocab].
        temperature: float32 [N]; 0 takes the most likely token.
        seeds, positions: int64 [N]; the noise is a function of both (`noise`).

    Returns:
        Token ids int64 [N], and the distributions they came from, float32 [N, vocab]: one-hot at temperature 0.
    """
    sampled = (temperature > 0)[:, None]
    scaled = logits.float() / torch.where(sampled, temperature[:, None], 1.0)
    keys = scaled + noise.gumbel(seeds, positions, noise.DRAFT, logits.shape[-1])
    ids = torch.where(sampled, keys, scaled).argmax(dim=-1)
    one_hot = torch.zeros_like(scaled).scatter_(1, ids[:, None], 1.0)
    return ids, torch.where(sampled, torch.softmax(scaled, dim=-1), one_hot)


@op(writes=("token_ids", "draft_token_ids"))
def draft_greedy(
    logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor
) -> None:
    """Write the most likely draft token of each request, as a target id.

    Args:
        logits: [R, draft_vocab].
        draft_to_target: int64 [draft_vocab]: target id minus draft id; None if the vocabularies are the same.
        draft_step: int64 [1]: the column to write. It is a device tensor, so that one captured step serves every step.
        token_ids: int64 [R], written: the next step's input.
        draft_token_ids: int64 [R, K], column `draft_step` written.
    """
    write_drafts(logits.argmax(dim=-1), draft_to_target, draft_step, token_ids, draft_token_ids)


@op(writes=("token_ids", "draft_token_ids", "draft_probs"))
def draft_gumbel(
    logits: Tensor,
    draft_to_target: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    seq_lens: Tensor,
    draft_step: Tensor,
    token_ids: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor,
) -> None:
    """Write one draft token per request from softmax(logits / temperature), and the distribution it came from.

    Args:
        logits, draft_to_target, draft_step, token_ids, draft_token_ids: as in `draft_greedy`.
        temperature: float32 [R]; 0 is greedy, with a one-hot distribution.
        seeds: int64 [R].
        seq_lens: int32 [R]: keys visible to the row, itself included. The row is at position seq_len - 1 and holds the
            token of position seq_len, so this op decides the token of position seq_len + 1, whose noise it takes.
        draft_probs: float32 [R, K, draft_vocab], column `draft_step` written.
    """
    ids, probs = sample_rows(logits, temperature, seeds, seq_lens.long() + 1)
    draft_probs.index_copy_(1, draft_step, probs[:, None])
    write_drafts(ids, draft_to_target, draft_step, token_ids, draft_token_ids)


@op(writes=("draft_token_ids",))
def draft_block_greedy(logits: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor) -> None:
    """Write the most likely token of every masked row of a parallel drafter's block.

    Args:
        logits: [R * K, draft_vocab].
        draft_to_target: as in `draft_greedy`.
        draft_token_ids: int64 [R, K], written.
    """
    draft_token_ids.copy_(to_target_ids(logits.argmax(dim=-1), draft_to_target).view(draft_token_ids.shape))


@op(writes=("draft_token_ids", "draft_probs"))
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
    """Write one token per masked row from softmax(logits / temperature), and the distributions they came from.

    Args:
        logits, draft_to_target, draft_token_ids: as in `draft_block_greedy`.
        temperature: float32 [R]; 0 is greedy, with one-hot distributions.
        seeds: int64 [R].
        start_positions: int64 [R], num_sampled: int32 [R]: as in `begin_block`. Draft token j (from 0) is the token of
            position start + num_sampled + 1 + j, whose noise it takes.
        draft_probs: float32 [R, K, draft_vocab], written.
    """
    requests, steps = draft_token_ids.shape
    positions = (start_positions + num_sampled)[:, None] + 1 + torch.arange(steps, device=logits.device)
    ids, probs = sample_rows(
        logits, temperature.repeat_interleave(steps), seeds.repeat_interleave(steps), positions.flatten()
    )
    draft_probs.copy_(probs.view(requests, steps, -1))
    draft_token_ids.copy_(to_target_ids(ids, draft_to_target).view(requests, steps))

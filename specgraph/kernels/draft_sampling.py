"""Picking one draft token a request, and putting it where the next step and the engine look for it."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import noise
from specgraph.kernels.library import define


def write_drafts(
    draft_ids: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor
) -> None:
    """Map draft ids [R] to the target's, and write them to `token_ids` and column `draft_step` of the result."""
    ids = draft_ids if draft_to_target is None else draft_ids + draft_to_target[draft_ids]
    token_ids.copy_(ids)
    draft_token_ids.index_copy_(1, draft_step, ids[:, None])


def _greedy(
    logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor
) -> None:
    write_drafts(logits.argmax(dim=-1), draft_to_target, draft_step, token_ids, draft_token_ids)


_greedy_op = define(
    "draft_greedy(Tensor logits, Tensor? draft_to_target, Tensor draft_step, Tensor(a!) token_ids,"
    " Tensor(b!) draft_token_ids) -> ()",
    reference=_greedy,
)


def draft_greedy(
    logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor
) -> None:
    """The most likely token: argmax in the draft vocabulary, then one id mapped to the target's.

    Args:
        logits: [R, draft_vocab].
        draft_to_target: int64 [draft_vocab] offsets, or None.
        draft_step: int64 [1], the column to write: on the device, so that one captured step serves every step.
        token_ids: int64 [R], written: the next step's input.
        draft_token_ids: int64 [R, K], column `draft_step` written.
    """
    _greedy_op(logits, draft_to_target, draft_step, token_ids, draft_token_ids)


def _gumbel(
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
    sampled = (temperature > 0)[:, None]
    scaled = logits.float() / torch.where(sampled, temperature[:, None], 1.0)
    # The last visible key is the row itself, at position seq_len - 1; it takes the token at seq_len, so the token
    # decided here stands at seq_len + 1.
    keys = scaled + noise.gumbel(seeds, seq_lens.long() + 1, noise.DRAFT, logits.shape[-1])
    ids = torch.where(sampled, keys, scaled).argmax(dim=-1)
    one_hot = torch.zeros_like(scaled).scatter_(1, ids[:, None], 1.0)
    probs = torch.where(sampled, torch.softmax(scaled, dim=-1), one_hot)
    draft_probs.index_copy_(1, draft_step, probs[:, None])
    write_drafts(ids, draft_to_target, draft_step, token_ids, draft_token_ids)


_gumbel_op = define(
    "draft_gumbel(Tensor logits, Tensor? draft_to_target, Tensor temperature, Tensor seeds, Tensor seq_lens,"
    " Tensor draft_step, Tensor(a!) token_ids, Tensor(b!) draft_token_ids, Tensor(c!) draft_probs) -> ()",
    reference=_gumbel,
)


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
    """A token from softmax(logits / temperature) by the Gumbel-max trick, and the distribution it came from.

    Args:
        logits, draft_to_target, draft_step, token_ids, draft_token_ids: as in `draft_greedy`.
        temperature: float32 [R]; 0 is greedy, with a one-hot distribution.
        seeds: int64 [R].
        seq_lens: int32 [R], keys visible to the row: names the position whose noise is drawn.
        draft_probs: float32 [R, K, draft_vocab], column `draft_step` written.
    """
    _gumbel_op(
        logits, draft_to_target, temperature, seeds, seq_lens, draft_step, token_ids, draft_token_ids, draft_probs
    )

"""Verification that accepts by chance: for measuring speed at a known acceptance, whatever the weights say."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import noise
from specgraph.kernels.library import define
from specgraph.kernels.rejection import commit


def _synthetic(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    chances: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    requests, steps = draft_token_ids.shape
    positions = start_positions.clamp(min=0)[:, None] + 1 + torch.arange(steps, device=seeds.device)
    row_seeds = seeds[:, None].expand(requests, steps).flatten()
    u = noise.uniform(row_seeds, positions.flatten(), noise.ACCEPT, 1).view(requests, steps)
    accept = (u < chances) & (draft_token_ids >= 0)
    chosen = target_logits.argmax(dim=-1).view(requests, steps + 1)
    commit(accept, chosen, draft_token_ids, start_positions >= 0, sampled_token_ids, num_sampled)


_synthetic_op = define(
    "verify_synthetic(Tensor target_logits, Tensor draft_token_ids, Tensor chances, Tensor seeds,"
    " Tensor start_positions, Tensor(a!) sampled_token_ids, Tensor(b!) num_sampled) -> ()",
    reference=_synthetic,
)


def verify_synthetic(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    chances: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Accept draft token i with probability chances[i] if all before it stand. The output is not the target's text.

    Args:
        target_logits, draft_token_ids, start_positions, sampled_token_ids, num_sampled: as in `verify_greedy`.
        chances: float32 [K].
        seeds: int64 [R]: the same seed and position always decide alike.
    """
    _synthetic_op(target_logits, draft_token_ids, chances, seeds, start_positions, sampled_token_ids, num_sampled)

"""Deciding which draft tokens are accepted: exact for greedy decoding, lossless for sampling.

The sampled rule is that of Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318), with p the
target's distribution and q the drafter's: accept draft token d with probability min(1, p(d) / q(d)); at the first
rejection sample from the normalised max(p - q, 0); if all are accepted, sample one more token from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops import noise
from specgraph.ops.library import op


def commit(
    accept: Tensor, chosen: Tensor, draft_token_ids: Tensor, live: Tensor, sampled: Tensor, num_sampled: Tensor
) -> None:
    """Write the accepted draft tokens, the target's own token after them, then -1; and how many tokens that is.

    Args:
        accept: bool [R, K]: whether a draft token is accepted if all before it are.
        chosen: int64 [R, K + 1]: the target's own token for each place.
        draft_token_ids: int64 [R, K].
        live: bool [R].
        sampled: int64 [R, K + 1], written.
        num_sampled: int32 [R], written: 0 where not live.
    """
    accepted = accept.long().cumprod(dim=1).sum(dim=1)
    column = torch.arange(chosen.shape[1], device=chosen.device)
    drafts = torch.cat([draft_token_ids, draft_token_ids.new_zeros(draft_token_ids.shape[0], 1)], dim=1)
    tokens = torch.where(column < accepted[:, None], drafts, chosen)
    sampled.copy_(torch.where((column <= accepted[:, None]) & live[:, None], tokens, -1))
    num_sampled.copy_(torch.where(live, accepted + 1, 0))


@op(writes=("sampled_token_ids", "num_sampled"))
def verify_greedy(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Accept draft tokens while they are the target's argmax.

    Args:
        target_logits: [R * (K + 1), vocab]; row i of a request scores the token after its i-th row.
        draft_token_ids: int64 [R, K]; -1 means no draft token, and is rejected.
        start_positions: int64 [R]; negative marks an inert request.
        sampled_token_ids: int64 [R, K + 1], written: accepted drafts, the target's token, then -1.
        num_sampled: int32 [R], written: accepted + 1; 0 for inert requests.
    """
    requests, steps = draft_token_ids.shape
    chosen = target_logits.argmax(dim=-1).view(requests, steps + 1)
    accept = chosen[:, :-1] == draft_token_ids
    commit(accept, chosen, draft_token_ids, start_positions >= 0, sampled_token_ids, num_sampled)


@op(writes=("sampled_token_ids", "num_sampled"))
def verify_sampled(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    draft_to_target: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Accept or replace draft tokens so that the output follows softmax(target_logits / temperature).

    Args:
        target_logits, draft_token_ids, start_positions, sampled_token_ids, num_sampled: as in `verify_greedy`.
        draft_probs: float32 [R, K, draft_vocab], the distributions that the draft tokens were sampled from; None
            if the drafter was greedy: all its probability is on the token it chose.
        draft_to_target: as in `draft_greedy`.
        temperature: float32 [R]; 0 is greedy.
        seeds: int64 [R].
    """
    requests, steps = draft_token_ids.shape
    vocab = target_logits.shape[-1]
    given, draft_token_ids = draft_token_ids >= 0, draft_token_ids.clamp(min=0)
    sampling = temperature > 0
    logits = target_logits.float().view(requests, steps + 1, vocab)
    scaled = logits / torch.where(sampling, temperature, 1.0)[:, None, None]
    p = torch.softmax(scaled, dim=-1)
    q = torch.zeros_like(p[:, :steps])
    if draft_probs is None:
        q.scatter_(2, draft_token_ids[..., None], 1.0)
    elif draft_to_target is None:
        q.copy_(draft_probs)
    else:
        ids = torch.arange(draft_to_target.shape[0], device=p.device) + draft_to_target
        q.index_copy_(2, ids, draft_probs)
    q.masked_fill_(~given[..., None], 0.0)  # no draft token: nothing was sampled, whatever draft_probs holds
    p_draft = p[:, :steps].gather(2, draft_token_ids[..., None])[..., 0]
    q_draft = q.gather(2, draft_token_ids[..., None])[..., 0]
    # Row i decides the token of position start + 1 + i.
    positions = (start_positions.clamp(min=0)[:, None] + 1 + torch.arange(steps + 1, device=p.device)).flatten()
    row_seeds = seeds[:, None].expand(requests, steps + 1).flatten()
    u = noise.uniform(row_seeds, positions, noise.ACCEPT, 1).view(requests, steps + 1)[:, :steps]
    accept = u * q_draft < p_draft
    residual = torch.cat([(p[:, :steps] - q).clamp(min=0), p[:, steps:]], dim=1)
    empty = residual.sum(dim=-1, keepdim=True) <= 0  # p equals q up to rounding
    keys = torch.where(empty, p, residual).log()
    keys = keys + noise.gumbel(row_seeds, positions, noise.RESAMPLE, vocab).view_as(keys)
    best = logits.argmax(dim=-1)
    chosen = torch.where(sampling[:, None], keys.argmax(dim=-1), best)
    accept = torch.where(sampling[:, None], accept, best[:, :steps] == draft_token_ids)
    commit(accept & given, chosen, draft_token_ids, start_positions >= 0, sampled_token_ids, num_sampled)


@op(writes=("sampled_token_ids", "num_sampled"))
def verify_synthetic(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    chances: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Accept draft token i with probability chances[i] if all before it are accepted. The output is not the target's.

    For measuring speed at a known acceptance, whatever the weights are.

    Args:
        target_logits, draft_token_ids, start_positions, sampled_token_ids, num_sampled: as in `verify_greedy`.
        chances: float32 [K].
        seeds: int64 [R]: the decision is a function of seed and position.
    """
    requests, steps = draft_token_ids.shape
    positions = start_positions.clamp(min=0)[:, None] + 1 + torch.arange(steps, device=seeds.device)
    row_seeds = seeds[:, None].expand(requests, steps).flatten()
    u = noise.uniform(row_seeds, positions.flatten(), noise.ACCEPT, 1).view(requests, steps)
    accept = (u < chances) & (draft_token_ids >= 0)
    chosen = target_logits.argmax(dim=-1).view(requests, steps + 1)
    commit(accept, chosen, draft_token_ids, start_positions >= 0, sampled_token_ids, num_sampled)

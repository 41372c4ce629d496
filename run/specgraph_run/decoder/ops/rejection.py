"""Rejection sampling decides which draft tokens are accepted. It is exact for greedy decoding, lossless for sampling.

The rule for sampling is from Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). p is the
target's distribution, and q the drafter's. A draft token d is accepted with probability min(1, p(d) / q(d)). At the
first rejection, a token is sampled from the normalised max(p - q, 0). If all are accepted, one more token is sampled
from p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops import noise
from specgraph.ops.library import op


class Acceptance(NamedTuple):
    """The rule that accepts draft tokens.

    By default a draft token is accepted if it is the target's argmax. With `temperature`, the output follows
    softmax(target_logits / temperature). With `chances`, draft tokens are accepted by chance.
    """

    temperature: Tensor | None = None
    """float32 [R]; 0 is greedy."""
    seeds: Tensor | None = None
    """int64 [R], needed with temperature or chances: the noise is a function of seed and position."""
    draft_probs: Tensor | None = None
    """float32 [R, K, draft_vocab]: the distributions that the draft tokens of a chain were drawn from. None if the
    drafter was greedy: then each has probability 1 for its draft token."""
    draft_to_target: Tensor | None = None
    """int64 [draft_vocab]: target id minus draft id for the columns of `draft_probs`. None if ids are equal."""
    chances: Tensor | None = None
    """float32 [K]: if all draft tokens before it are accepted, draft token i is accepted with probability chances[i].
    Only without `temperature`. The output is then not the target's: this measures the speed at a chosen acceptance, for
    any weights."""


class Sampled(NamedTuple):
    """The result of a verify."""

    token_ids: Tensor
    """int64 [R, K + 1], written: the accepted drafts, the target's own token, then -1."""
    num_sampled: Tensor
    """int32 [R], written: accepted + 1; 0 for inert requests."""


def commit(accept: Tensor, chosen: Tensor, draft_token_ids: Tensor, live: Tensor, sampled: Sampled) -> None:
    """Write the accepted draft tokens, the target's own token after them, then -1, and the number of these tokens.

    Args:
        accept: bool [R, K]: whether each draft token is accepted if all before it are.
        chosen: int64 [R, K + 1]: the target's own token for each place.
        draft_token_ids: int64 [R, K].
        live: bool [R]: a request samples nothing if it is False.
    """
    accepted = accept.long().cumprod(dim=1).sum(dim=1)
    column = torch.arange(chosen.shape[1], device=chosen.device)
    drafts = torch.cat([draft_token_ids, draft_token_ids.new_zeros(draft_token_ids.shape[0], 1)], dim=1)
    tokens = torch.where(column < accepted[:, None], drafts, chosen)
    sampled.token_ids.copy_(torch.where((column <= accepted[:, None]) & live[:, None], tokens, -1))
    sampled.num_sampled.copy_(torch.where(live, accepted + 1, 0))


def accept_greedy(chosen: Tensor, draft_token_ids: Tensor, start_positions: Tensor, sampled: Sampled) -> None:
    """Accept draft tokens up to the first that is not the target's own token.

    chosen: int64 [R * (K + 1)], the target's own tokens. The other arguments are as in `verify_drafts`.
    """
    chosen = chosen.view(sampled.token_ids.shape)
    commit(chosen[:, :-1] == draft_token_ids, chosen, draft_token_ids, start_positions >= 0, sampled)


def accepted_by_chance(chances: Tensor, seeds: Tensor | None, start_positions: Tensor) -> Tensor:
    """Return whether each draft token is accepted if all before it are: bool [R, K]."""
    assert seeds is not None
    positions = start_positions.clamp(min=0)[:, None] + 1 + torch.arange(chances.shape[0], device=chances.device)
    return noise.uniform(seeds[:, None], positions, noise.ACCEPT, 1)[..., 0] < chances


@op(writes=("sampled",))
def verify_drafts(
    target_logits: Tensor, draft_token_ids: Tensor, start_positions: Tensor, acceptance: Acceptance, sampled: Sampled
) -> None:
    """Accept draft tokens of chains, and take the target's own token after the accepted ones.

    Args:
        target_logits: [R * (K + 1), vocab]; row i of a request scores the token that follows row i.
        draft_token_ids: int64 [R, K]; -1 is no draft token, and is rejected.
        start_positions: int64 [R]; negative marks an inert request.
    """
    best = target_logits.argmax(dim=-1)
    if acceptance.chances is not None:
        accept = accepted_by_chance(acceptance.chances, acceptance.seeds, start_positions) & (draft_token_ids >= 0)
        commit(accept, best.view(sampled.token_ids.shape), draft_token_ids, start_positions >= 0, sampled)
    elif acceptance.temperature is None:
        accept_greedy(best, draft_token_ids, start_positions, sampled)
    else:
        _verify_by_temperature(target_logits, best, draft_token_ids, start_positions, acceptance, sampled)


def _verify_by_temperature(
    target_logits: Tensor, best: Tensor, draft_token_ids: Tensor, start_positions: Tensor, acceptance: Acceptance,
    sampled: Sampled,
) -> None:  # fmt: skip
    temperature, seeds, draft_probs, draft_to_target, _ = acceptance
    assert temperature is not None
    assert seeds is not None
    requests, steps = draft_token_ids.shape
    vocab = target_logits.shape[-1]
    given, draft_token_ids = draft_token_ids >= 0, draft_token_ids.clamp(min=0)
    sampling = temperature > 0
    logits = target_logits.float().view(requests, steps + 1, vocab)
    p = torch.softmax(logits / torch.where(sampling, temperature, 1.0)[:, None, None], dim=-1)
    q = torch.zeros_like(p[:, :steps])
    if draft_probs is None:
        q.scatter_(2, draft_token_ids[..., None], 1.0)
    elif draft_to_target is None:
        q.copy_(draft_probs)
    else:
        ids = torch.arange(draft_to_target.shape[0], device=p.device) + draft_to_target
        q.index_copy_(2, ids, draft_probs)
    q.masked_fill_(~given[..., None], 0.0)  # no draft token was drawn there, so draft_probs means nothing
    p_draft = p[:, :steps].gather(2, draft_token_ids[..., None])[..., 0]
    q_draft = q.gather(2, draft_token_ids[..., None])[..., 0]
    # Row i decides the token at position start + 1 + i.
    positions = start_positions.clamp(min=0)[:, None] + 1 + torch.arange(steps + 1, device=p.device)
    u = noise.uniform(seeds[:, None], positions[:, :steps], noise.ACCEPT, 1)[..., 0]
    residual = torch.cat([(p[:, :steps] - q).clamp(min=0), p[:, steps:]], dim=1)
    empty = residual.sum(dim=-1, keepdim=True) <= 0  # p equals q up to rounding
    keys = torch.where(empty, p, residual).log()
    keys = keys + noise.gumbel(seeds[:, None], positions, noise.RESAMPLE, vocab)
    best = best.view(requests, steps + 1)
    chosen = torch.where(sampling[:, None], keys.argmax(dim=-1), best)
    accept = torch.where(sampling[:, None], u * q_draft < p_draft, best[:, :steps] == draft_token_ids)
    commit(accept & given, chosen, draft_token_ids, start_positions >= 0, sampled)

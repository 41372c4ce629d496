"""Logits as a request's sampling parameters make them: bias, penalties, then top_k, top_p and min_p.

The result is what rejection sampling takes for the target's logits, so a request's output follows the distribution that
its parameters define, whatever was drafted. Each row of a verify has a context of its own: the drafts before it count
as tokens of the output, since they are when the row is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.library import op

EXCLUDED = -1e30
"""The logit of a token that may not be chosen: its probability is 0 in float32, and no kernel meets infinity."""

SORTED_TOGETHER = 64
"""Rows that are sorted in one call, about: few rows leave a GPU idle, and all of a large batch take much memory."""


def _fake(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32)


@op(fake=_fake)
def adjust_logits(
    logits: Tensor,
    draft_token_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    bias: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Logits [R * (K + 1), vocab] with each request's parameters applied; tokens left out have the logit EXCLUDED.

    In this order, as in vLLM: bias; repetition penalty (a positive logit is divided by it, a negative one multiplied)
    for tokens of prompt and output; frequency penalty times the count in the output, and presence penalty where it is
    not 0; then of softmax(logits / temperature) the tokens with at least min_p of the largest probability, of these the
    top_k most likely, and of these, renormalised, the fewest that reach top_p. Ties go to lower token ids.

    Args:
        logits: row i of a request scores the token after its i-th row.
        draft_token_ids: int64 [R, K]: draft i is the token of row i + 1. -1 is no draft.
        temperature: float32 [R]; 0 is greedy, and then nothing is left out.
        top_k: int64 [R]; 0 for all. top_p: float32 [R]; 1 for all. min_p: float32 [R]; 0 for all.
        repetition_penalty: float32 [R]; 1 for none.
        presence_penalty, frequency_penalty: float32 [R]; 0 for none.
        bias: float32 [R, vocab].
        output_counts: int32 [R, vocab]: how often each token is in the output before row 0.
        in_prompt: bool [R, vocab].
        ancestors: int64 [R * (K + 1)], as `begin_tree_verify` writes them: bit j of a row is set if the token of row j
            is in its context. None for a chain: row i has drafts 0 to i - 1 in its context.

    Returns:
        float32, in the shape of logits.
    """
    requests, steps = draft_token_ids.shape
    rows = logits.float().view(requests, steps + 1, -1)
    adjusted = torch.empty_like(rows)
    top_k, top_p, min_p, temperature, repetition, presence, frequency = (
        each[:, None, None]
        for each in (top_k, top_p, min_p, temperature, repetition_penalty, presence_penalty, frequency_penalty)
    )
    sampling = temperature > 0
    scale, limit = torch.where(sampling, temperature, 1.0), torch.where(top_k > 0, top_k, rows.shape[-1])
    rank, place = (torch.arange(size, device=logits.device) for size in (rows.shape[-1], steps + 1))
    if ancestors is None:
        context = (place[:, None] > place[:-1]).expand(requests, steps + 1, steps)
    else:
        words = ancestors.view(requests, steps + 1, 1).expand(requests, steps + 1, steps)
        context = ((words >> place[1:].expand_as(words)) & 1).bool()  # a device's shift may not broadcast
    context = context & (draft_token_ids >= 0)[:, None]
    ids = draft_token_ids.clamp(min=0)[:, None].expand(requests, steps + 1, steps)
    together = max(1, SORTED_TOGETHER // requests)
    for first in range(0, steps + 1, together):
        part = slice(first, first + together)
        counts = output_counts[:, None].repeat(1, rows[:, part].shape[1], 1)
        counts.scatter_add_(2, ids[:, part], context[:, part].to(counts.dtype))
        x = rows[:, part] + bias[:, None]
        x = torch.where(in_prompt[:, None] | (counts > 0), torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * counts - presence * (counts > 0)
        ordered, order = x.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered / scale, dim=-1)
        kept = (p >= min_p * p[..., :1]) & (rank < limit)
        p = torch.where(kept, p, 0.0)
        p = p / p.sum(dim=-1, keepdim=True)
        kept &= (p.cumsum(dim=-1) - p < top_p) | (top_p >= 1) | (rank == 0)
        kept = torch.zeros_like(kept).scatter_(2, order, kept)
        adjusted[:, part] = torch.where(kept | ~sampling, x, EXCLUDED)
    return adjusted.view_as(logits)


@op(writes=("output_counts",))
def count_tokens(token_ids: Tensor, output_counts: Tensor) -> None:
    """Add 1 to the count of each token.

    Args:
        token_ids: int64 [R, n]; negative ones are left out.
        output_counts: int32 [R, vocab], written.
    """
    output_counts.scatter_add_(1, token_ids.clamp(min=0), (token_ids >= 0).to(output_counts.dtype))


@op(writes=("logprobs",))
def emitted_logprobs(logits: Tensor, sampled_token_ids: Tensor, logprobs: Tensor) -> None:
    """The log-probability of each sampled token under softmax(logits).

    Args:
        logits: [R * n, vocab], as the model gives them.
        sampled_token_ids: int64 [R, n]; negative ones get 0.
        logprobs: float32 [R, n], written.
    """
    ids = sampled_token_ids.flatten()[:, None]
    values = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.clamp(min=0))
    logprobs.copy_(torch.where(ids >= 0, values, 0.0).view_as(logprobs))

"""Ops for the tokens that a verify sampled: counts, log-probabilities, and the inputs of the next verify."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op


@op(writes=("output_counts",))
def count_tokens(token_ids: Tensor, output_counts: Tensor) -> None:
    """Add 1 to output_counts, int32 [R, vocab], for each token of token_ids, int64 [R, n]. Negative ids are skipped."""
    output_counts.scatter_add_(1, token_ids.clamp(min=0), (token_ids >= 0).to(output_counts.dtype))


@op(writes=("logprobs",))
def emitted_logprobs(logits: Tensor, sampled_token_ids: Tensor, logprobs: Tensor) -> None:
    """Write the log-probability of each sampled token under softmax(logits).

    Args:
        logits: [R * n, vocab], the model's own, without temperature or other sampling parameters.
        sampled_token_ids: int64 [R, n].
        logprobs: float32 [R, n], written; 0 for a negative token id.
    """
    ids = sampled_token_ids.flatten()[:, None]
    values = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.clamp(min=0))
    logprobs.copy_(torch.where(ids >= 0, values, 0.0).view_as(logprobs))


@op(writes=("start_positions", "last_token_ids", "to_draft_token_ids"))
def next_verify(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    last_token_ids: Tensor,
    to_draft_token_ids: Tensor,
) -> None:
    """Write the inputs of the verify that follows a propose: each request's last token, position and drafts.

    Args:
        sampled_token_ids: int64 [R, query_len]: the tokens that the last verify sampled.
        num_sampled: int32 [R]; 0 marks an inert request.
        draft_token_ids: int64 [R, K], the drafts that the propose made after them.
        start_positions: int64 [R]: num_sampled is added; -1 is written for inert requests.
        last_token_ids: int64 [R], written: the last sampled token; 0 for inert requests.
        to_draft_token_ids: int64 [R, K], written: the drafts.
    """
    live = num_sampled > 0
    last = (num_sampled[:, None].long() - 1).clamp(min=0)
    last_token_ids.copy_(torch.where(live, sampled_token_ids.gather(1, last)[:, 0], 0))
    start_positions.copy_(torch.where(live, start_positions + num_sampled, -1))
    to_draft_token_ids.copy_(draft_token_ids)

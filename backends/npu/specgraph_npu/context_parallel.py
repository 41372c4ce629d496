"""Attention over a KV cache that is spread over ranks (decode or prefill context parallelism).

Each rank attends to the keys it holds and gives its part with the log-sum-exp of its scores; the parts are merged.
The lengths are host parameters on every rank, one list a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_lengths(seq_lens: Sequence[int], ranks: int, interleave: int) -> list[list[int]]:
    """How many keys of each request every rank holds.

    Args:
        seq_lens: keys of each request.
        ranks: ranks that a request's keys are dealt to, in turn.
        interleave: consecutive keys that one rank gets at a time (1, or the block size).

    Returns:
        One list a rank, in rank order; the entries of each request sum to its length.
    """
    whole = ranks * interleave
    return [
        [n // whole * interleave + min(max(n % whole - rank * interleave, 0), interleave) for n in seq_lens]
        for rank in range(ranks)
    ]


def merge_partial_attention(parts: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Merge partial outputs over disjoint sets of keys: the softmax-weighted mean by their log-sum-exp.

    With L_i = log sum exp of part i's scores, out = sum_i exp(L_i - L) out_i, L = logsumexp_i L_i (the split-K rule
    of flash decoding). A part without keys reports +inf or -inf and has weight 0; rows without any keys give 0.

    Args:
        parts: [P, T, heads, dim].
        log_sum_exp: float32 [P, T, heads, 1].

    Returns:
        [T, heads, dim] in the dtype of `parts`.
    """
    weights = torch.where(log_sum_exp.isinf(), torch.full_like(log_sum_exp, -1e30), log_sum_exp)
    highest = weights.amax(dim=0, keepdim=True)
    shares = torch.where(weights <= -1e30, torch.zeros_like(weights), (weights - highest).exp())
    total = shares.sum(dim=0)
    merged = (parts.float() * shares).sum(dim=0) / total.clamp(min=1e-30)
    return merged.to(parts.dtype)

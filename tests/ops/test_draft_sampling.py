"""Drafting by temperature along the positions of one request; the op table has the rest (`op_rows/draws.py`)."""

from __future__ import annotations

import pytest
import torch
from goodness_of_fit import follows
from torch import Tensor

from specgraph import ops


def gumbel(logits: Tensor, *, temperature: float, seeds, seq_lens) -> tuple[Tensor, Tensor]:
    """Tokens [R] and distributions [R, vocab] of one step."""
    requests, vocab = logits.shape
    token_ids, drafts = torch.full((requests,), -7), torch.full((requests, 1), -7)
    draws = ops.Draws(
        torch.full((requests,), temperature),
        torch.as_tensor(seeds).expand(requests).contiguous(),
        torch.as_tensor(seq_lens, dtype=torch.int32).expand(requests).contiguous(),
        None,
        torch.full((requests, 1, vocab), -1.0),
    )
    ops.draft_from_logits(logits, ops.Drafts(drafts, None, torch.tensor([0]), token_ids), draws)
    return token_ids, draws.draft_probs[:, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_positions_of_one_seed_follow_the_distribution_that_is_reported(temperature):
    n, logits = 40_000, torch.randn(1, 6, generator=torch.Generator().manual_seed(0)) * 2
    tokens, probs = gumbel(
        logits.expand(n, 6).contiguous(), temperature=temperature, seeds=5, seq_lens=torch.arange(1, n + 1)
    )
    wanted = torch.softmax(logits[0].double() / temperature, 0)
    torch.testing.assert_close(probs, wanted.float().expand(n, 6))
    counts = torch.bincount(tokens, minlength=6)
    assert follows(counts, wanted)
    assert not follows(counts, torch.softmax(logits[0].double() / (temperature * 1.1), 0))


def test_a_run_repeats_and_does_not_depend_on_the_batch_around_it():
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    seeds, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([7, 7, 30, 2, 0])
    together = gumbel(logits, temperature=1.0, seeds=seeds, seq_lens=lengths)
    again = gumbel(logits, temperature=1.0, seeds=seeds, seq_lens=lengths)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    for i in range(5):
        alone = gumbel(logits[i : i + 1], temperature=1.0, seeds=seeds[i], seq_lens=lengths[i])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone, strict=True))

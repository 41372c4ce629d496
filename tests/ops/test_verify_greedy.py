"""Greedy verification against a loop that checks one draft token after the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specgraph import ops


def naive(choices: list[int], drafts: list[int], start: int) -> tuple[list[int], int]:
    """(the row of sampled tokens filled up with -1, how many)"""
    if start < 0:
        return [-1] * len(choices), 0
    kept: list[int] = []
    for choice, draft in zip(choices, drafts, strict=False):
        if choice != draft:
            break
        kept.append(draft)
    kept.append(choices[len(kept)])
    return kept + [-1] * (len(choices) - len(kept)), len(kept)


@given(st.integers(1, 6), st.integers(0, 7), st.data())
def test_against_the_loop(requests, steps, data):
    vocab, row = 5, st.lists(st.integers(0, 4), min_size=steps + 1, max_size=steps + 1)
    choices = data.draw(st.lists(row, min_size=requests, max_size=requests))
    starts = data.draw(st.lists(st.integers(-1, 9), min_size=requests, max_size=requests))
    drafts = [list(c[:steps]) for c in choices]
    for draft in drafts:  # break each chain somewhere, or nowhere
        at = data.draw(st.integers(0, steps))
        if at < steps:
            draft[at] = data.draw(st.sampled_from([-1, (draft[at] + 1) % vocab]))
    logits = torch.rand(requests * (steps + 1), vocab, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(requests * (steps + 1)), torch.tensor(choices).flatten()] += 1
    sampled = torch.full((requests, steps + 1), -7)
    counts = torch.full((requests,), -7, dtype=torch.int32)
    drafts_tensor = torch.tensor(drafts, dtype=torch.int64).view(requests, steps)
    ops.verify_greedy(logits, drafts_tensor, torch.tensor(starts), sampled, counts)
    wanted = [naive(c, d, s) for c, d, s in zip(choices, drafts, starts, strict=True)]
    assert sampled.tolist() == [tokens for tokens, _ in wanted]
    assert counts.tolist() == [count for _, count in wanted]


def test_a_match_after_a_mismatch_does_not_count():
    logits = torch.eye(4)[[1, 2, 3, 0]]
    sampled, counts = torch.empty(1, 4, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    ops.verify_greedy(logits, torch.tensor([[0, 2, 3]]), torch.tensor([5]), sampled, counts)
    assert sampled.tolist() == [[1, -1, -1, -1]]
    assert counts.tolist() == [1]

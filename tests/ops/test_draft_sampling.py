"""Drafting one token per request: which token, where it is written, and from which distribution it came."""

from __future__ import annotations

import pytest
import torch
from goodness_of_fit import follows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specgraph import ops

OFFSETS = torch.tensor([0, 0, 3, 3, 10, 40])  # draft ids 0..5 are target ids 0, 1, 5, 6, 14, 45


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@given(st.integers(1, 6), st.integers(1, 7), st.data())
def test_greedy(requests, steps, data):
    column = data.draw(st.integers(0, steps - 1))
    offsets = data.draw(st.sampled_from([None, OFFSETS]))
    logits = random_logits(requests, 6, data.draw(st.integers(0, 999)))
    token_ids, drafts = torch.full((requests,), -7), torch.full((requests, steps), -7)
    ops.draft_greedy(logits, offsets, torch.tensor([column]), token_ids, drafts)
    best = [max(range(6), key=row.__getitem__) for row in logits.tolist()]
    wanted = [b if offsets is None else b + int(offsets[b]) for b in best]
    assert token_ids.tolist() == wanted
    assert drafts[:, column].tolist() == wanted
    others = [c for c in range(steps) if c != column]
    assert (drafts[:, others] == -7).all()


def gumbel(logits: Tensor, *, temperature, seeds, seq_lens, step=0, steps=3, offsets=None):
    requests, vocab = logits.shape
    token_ids, drafts = torch.full((requests,), -7), torch.full((requests, steps), -7)
    probs = torch.full((requests, steps, vocab), -1.0)
    ops.draft_gumbel(
        logits,
        offsets,
        torch.as_tensor(temperature, dtype=torch.float32).expand(requests).contiguous(),
        torch.as_tensor(seeds).expand(requests).contiguous(),
        torch.as_tensor(seq_lens, dtype=torch.int32).expand(requests).contiguous(),
        torch.tensor([step]),
        token_ids,
        drafts,
        probs,
    )
    return token_ids, drafts, probs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_follows_the_distribution_that_it_reports(temperature):
    n, logits = 40_000, random_logits(1, 6)
    _, drafts, probs = gumbel(
        logits.expand(n, 6).contiguous(), temperature=temperature, seeds=5, seq_lens=torch.arange(1, n + 1), step=1
    )
    wanted = torch.softmax(logits[0].double() / temperature, 0)
    torch.testing.assert_close(probs[:, 1], wanted.float().expand(n, 6))
    counts = torch.bincount(drafts[:, 1], minlength=6)
    assert follows(counts, wanted)
    assert not follows(counts, torch.softmax(logits[0].double() / (temperature * 1.1), 0))
    assert (probs[:, [0, 2]] == -1).all()
    assert (drafts[:, [0, 2]] == -7).all()


def test_seeds_alone_also_sample_the_distribution():
    n, logits = 40_000, random_logits(1, 6, seed=1)
    _, drafts, _ = gumbel(logits.expand(n, 6).contiguous(), temperature=1.0, seeds=torch.arange(n), seq_lens=9)
    assert follows(torch.bincount(drafts[:, 0], minlength=6), torch.softmax(logits[0].double(), 0))


def test_temperature_zero_is_greedy_with_a_one_hot_distribution():
    logits = random_logits(8, 6)
    token_ids, drafts, probs = gumbel(logits, temperature=[0.0, 1.0] * 4, seeds=torch.arange(8), seq_lens=4)
    best = logits.argmax(1)
    assert torch.equal(drafts[::2, 0], best[::2])
    assert torch.equal(probs[::2, 0], torch.nn.functional.one_hot(best[::2], 6).float())
    torch.testing.assert_close(probs[1::2, 0], torch.softmax(logits[1::2], 1))
    assert torch.equal(token_ids, drafts[:, 0])


def test_the_offset_map_moves_tokens_but_not_the_distribution():
    n, logits = 2_000, random_logits(1, 6, seed=2)
    args = {"temperature": 1.0, "seeds": 3, "seq_lens": torch.arange(n)}
    _, plain, probs = gumbel(logits.expand(n, 6).contiguous(), **args)
    _, mapped, mapped_probs = gumbel(logits.expand(n, 6).contiguous(), offsets=OFFSETS, **args)
    assert torch.equal(mapped[:, 0], plain[:, 0] + OFFSETS[plain[:, 0]])
    assert torch.equal(mapped_probs, probs)


def test_a_run_repeats_and_does_not_depend_on_the_batch_around_it():
    logits = random_logits(5, 6, seed=3)
    seeds, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([7, 7, 30, 2, 0])
    together = gumbel(logits, temperature=1.0, seeds=seeds, seq_lens=lengths)
    again = gumbel(logits, temperature=1.0, seeds=seeds, seq_lens=lengths)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    for i in range(5):
        alone = gumbel(logits[i : i + 1], temperature=1.0, seeds=seeds[i], seq_lens=lengths[i])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone, strict=True))


def test_the_noise_is_that_of_the_position_of_the_token_decided():
    """With n visible keys the row is at n - 1 and its input token at n, so every step decides the token of n + 1."""
    from specgraph.ops import noise

    logits = random_logits(1, 6, seed=4)
    for length, step in ((4, 0), (5, 1), (6, 2)):
        _, drafts, _ = gumbel(logits, temperature=1.0, seeds=9, seq_lens=length, step=step)
        keys = logits + noise.gumbel(torch.tensor([9]), torch.tensor([length + 1]), noise.DRAFT, 6)
        assert int(drafts[0, step]) == int(keys.argmax())


def test_the_head_that_needs_no_logits_is_the_composition():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 16, generator=g), torch.randn(6, 16, generator=g)
    norm = torch.rand(16, generator=g) + 0.5
    x64 = x.double()
    normed = x64 / (x64.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    wanted = (normed @ weight.double().T).argmax(1)
    token_ids, drafts = torch.full((4,), -7), torch.full((4, 3), -7)
    ops.greedy_head(x, norm, 1e-5, weight, OFFSETS, torch.tensor([2]), token_ids, drafts)
    assert torch.equal(token_ids, wanted + OFFSETS[wanted])
    assert torch.equal(drafts[:, 2], token_ids)
    assert (drafts[:, :2] == -7).all()


def test_the_head_of_a_block_that_needs_no_logits_is_the_composition():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 16, generator=g), torch.randn(6, 16, generator=g)
    norm = torch.randn(16, generator=g)  # of both signs: without it other tokens win
    x64 = x.double()
    normed = x64 / (x64.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    best = (normed @ weight.double().T).argmax(1)
    drafts = torch.full((2, 5), -7)
    ops.greedy_block_head(x, norm, 1e-5, weight, OFFSETS, drafts[:, :3])
    assert torch.equal(drafts[:, :3], (best + OFFSETS[best]).view(2, 3))
    assert (drafts[:, 3:] == -7).all()

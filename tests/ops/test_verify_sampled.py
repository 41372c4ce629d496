"""Sampled verification is lossless, decides as the rule's own loop does, and a biased sampler is caught."""

from __future__ import annotations

import math

import pytest
import torch
from goodness_of_fit import follows
from hypothesis import given
from hypothesis import strategies as st
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph import ops
from specgraph.ops import noise

VOCAB, STEPS, N = 4, 2, 40_000


def bigram(seed: int, vocab: int = VOCAB, columns: int = VOCAB, scale: float = 1.5) -> Tensor:
    """Logits of the next token by the last one: a language model small enough to enumerate."""
    return torch.randn(vocab, columns, generator=torch.Generator().manual_seed(seed)) * scale


TARGET = bigram(1)
DRAFTERS = {
    "unlike the target": (bigram(2, scale=2.5), None),
    "the target itself": (TARGET, None),
    "nearly deterministic": (bigram(3, scale=20.0), None),
    "of fewer tokens": (bigram(4, columns=2), torch.tensor([1, 2])),  # draft ids 0, 1 are tokens 1, 3
}


def draft(drafter: Tensor, offsets: Tensor | None, temperature: Tensor, seeds: Tensor, starts: Tensor):
    """Chains drawn by the product's own op, with the noise of the same seeds: (token ids, distributions)."""
    n, token_ids = len(seeds), torch.zeros(len(seeds), dtype=torch.int64)
    drafts, probs = torch.zeros(n, STEPS, dtype=torch.int64), torch.zeros(n, STEPS, drafter.shape[1])
    for step in range(STEPS):
        logits = drafter[token_ids]
        # The first draft token is that of start + 1: the token at `start` is known.
        lengths = (starts + step).int()
        to = ops.Drafts(drafts, offsets, torch.tensor([step]), token_ids)
        ops.draft_from_logits(logits, to, ops.Draws(temperature, seeds, lengths, None, probs))
    return drafts, probs


def verify(logits: Tensor, drafts: Tensor, probs, offsets, temperature: Tensor, seeds: Tensor, starts: Tensor):
    sampled = torch.full((drafts.shape[0], drafts.shape[1] + 1), -7)
    counts = torch.full((drafts.shape[0],), -7, dtype=torch.int32)
    acceptance = decoder_ops.Acceptance(temperature, seeds, probs, offsets)
    decoder_ops.verify_drafts(logits, drafts, starts, acceptance, decoder_ops.Sampled(sampled, counts))
    return sampled, counts


def target_rows(drafts: Tensor) -> Tensor:
    """Target logits of a verify pass: row i is scored after token i of [0, *drafts]."""
    rows = torch.cat([torch.zeros(len(drafts), 1, dtype=torch.int64), drafts.clamp(min=0)], dim=1)
    return TARGET[rows].flatten(0, 1)


def joint(temperature: float) -> Tensor:
    """Probability of each continuation of STEPS + 1 tokens after token 0, flattened."""
    p = torch.softmax(TARGET.double() / temperature, dim=1)
    probability = p[0]
    for _ in range(STEPS):
        probability = (probability[..., None] * p).flatten()
        probability = probability.view(-1, VOCAB)
    return probability.flatten()


def continuations(sampled: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """Return how often each continuation came out; what verification left open is drawn from the target itself."""
    p = torch.softmax(TARGET / temperature, dim=1)
    g = torch.Generator().manual_seed(99)
    tokens = sampled.clone()
    for column in range(1, STEPS + 1):
        drawn = torch.multinomial(p[tokens[:, column - 1]], 1, generator=g)[:, 0]
        tokens[:, column] = torch.where(column < counts, tokens[:, column], drawn)
    index = sum(tokens[:, i] * VOCAB ** (STEPS - i) for i in range(STEPS + 1))
    return torch.bincount(index, minlength=VOCAB ** (STEPS + 1))


def batch(n: int = N):
    return torch.full((n,), 1.0), torch.arange(n), torch.full((n,), 6)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_lossless(drafter, temperature):
    logits, offsets = DRAFTERS[drafter]
    warmth, seeds, starts = batch()
    warmth *= temperature
    drafts, probs = draft(logits, offsets, warmth, seeds, starts)
    sampled, counts = verify(target_rows(drafts), drafts, probs, offsets, warmth, seeds, starts)
    assert counts.unique().tolist() == ([3] if drafter == "the target itself" else [1, 2, 3])
    assert follows(continuations(sampled, counts, temperature), joint(temperature))


def test_lossless_along_positions_of_one_seed():
    warmth, _, _ = batch()
    seeds, starts = torch.full((N,), 123), torch.arange(N) * 4
    drafts, probs = draft(DRAFTERS["unlike the target"][0], None, warmth, seeds, starts)
    sampled, counts = verify(target_rows(drafts), drafts, probs, None, warmth, seeds, starts)
    assert follows(continuations(sampled, counts, 1.0), joint(1.0))


def test_lossless_with_drafts_taken_with_certainty():
    """A greedy drafter hands over no distribution. Its token is kept as often as the target would have said it."""
    warmth, seeds, starts = batch()
    drafts, _ = draft(DRAFTERS["unlike the target"][0], None, warmth * 0, seeds, starts)
    assert len(drafts.unique(dim=0)) == 1
    sampled, counts = verify(target_rows(drafts), drafts, None, None, warmth, seeds, starts)
    assert follows(continuations(sampled, counts, 1.0), joint(1.0))
    share = (counts > 1).float().mean()
    assert share == pytest.approx(float(torch.softmax(TARGET[0], 0)[drafts[0, 0]]), abs=0.01)


def biased(kind: str, monkeypatch) -> Tensor:
    """Counts of a sampler with one of the field's mistakes."""
    warmth, seeds, starts = batch()
    if kind == "accepts with the noise that drew the draft":
        monkeypatch.setattr(noise, "ACCEPT", noise.DRAFT)
    if kind == "resamples with the noise that accepted":
        monkeypatch.setattr(noise, "RESAMPLE", noise.ACCEPT)
    drafter = DRAFTERS["unlike the target"][0] + torch.tensor([2.0, 0.0, 0.0, 0.0])
    drafts, probs = draft(drafter, None, warmth, seeds, starts)
    if kind == "accepts everything":
        probs = torch.zeros_like(probs)
    if kind == "forgets which distribution the draft came from":
        probs = torch.full_like(probs, 1 / VOCAB)
    if kind == "takes the distribution of the position before":
        probs = probs.roll(1, dims=1)
    if kind == "another temperature than the drafter's":
        warmth = warmth * 0.8
    sampled, counts = verify(target_rows(drafts), drafts, probs, None, warmth, seeds, starts)
    if kind == "resamples from the target instead of what is left":
        g = torch.Generator().manual_seed(5)
        last = (counts - 1).clamp(min=0)[:, None].long()
        before = torch.where(last > 0, sampled.gather(1, (last - 1).clamp(min=0)), 0)[:, 0]
        drawn = torch.multinomial(torch.softmax(TARGET[before], 1), 1, generator=g)
        sampled = sampled.scatter(1, last, torch.where(counts[:, None] <= STEPS, drawn, sampled.gather(1, last)))
    return continuations(sampled, counts, 1.0)


@pytest.mark.parametrize(
    "kind",
    [
        "accepts everything",
        "forgets which distribution the draft came from",
        "takes the distribution of the position before",
        "accepts with the noise that drew the draft",
        "resamples with the noise that accepted",
        "resamples from the target instead of what is left",
        "another temperature than the drafter's",
    ],
)
def test_a_biased_sampler_goes_red(kind, monkeypatch):
    assert not follows(biased(kind, monkeypatch), joint(1.0))


def test_the_same_harness_without_the_mistake_is_green(monkeypatch):
    assert follows(biased("none", monkeypatch), joint(1.0))


def naive(p: list[list[float]], q: list[list[float]], drafts: list[int], seed: int, start: int):
    """Leviathan et al. 2023, one token at a time, on Python floats; noise as documented by `ops.noise`."""

    def at(i: int, purpose: int, count: int) -> list[float]:
        return noise.uniform(torch.tensor([seed]), torch.tensor([start + 1 + i]), purpose, count)[0].tolist()

    out: list[int] = []
    for i, token in enumerate(drafts):
        if token >= 0 and at(i, noise.ACCEPT, 1)[0] < p[i][token] / max(q[i][token], 1e-300):
            out.append(token)
            continue
        left = p[i] if token < 0 else [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
        break
    else:
        i, left = len(drafts), p[len(drafts)]
    keys = [
        math.log(w) - math.log(-math.log1p(-u)) if w > 0 else -math.inf
        for w, u in zip(left, at(i, noise.RESAMPLE, len(left)), strict=True)
    ]
    return [*out, max(range(len(left)), key=keys.__getitem__)]


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 10**6), st.data())
def test_against_the_loop(requests, steps, seed, data):
    g = torch.Generator().manual_seed(seed)
    vocab = 7
    logits = torch.randn(requests * (steps + 1), vocab, generator=g) * 2
    q = torch.softmax(torch.randn(requests, steps, vocab, generator=g) * 2, -1)
    drafts = torch.randint(0, vocab, (requests, steps), generator=g)
    if steps:
        drafts = torch.where(torch.rand(requests, steps, generator=g) < 0.1, -1, drafts)
    seeds = torch.randint(-(2**40), 2**40, (requests,), generator=g)
    starts = torch.tensor(data.draw(st.lists(st.integers(-1, 50), min_size=requests, max_size=requests)))
    temperature = torch.full((requests,), 0.8)
    sampled, counts = verify(logits, drafts, q, None, temperature, seeds, starts)
    p = torch.softmax(logits.double() / 0.8, -1).view(requests, steps + 1, vocab).tolist()
    for r in range(requests):
        start = int(starts[r])
        wanted = [] if start < 0 else naive(p[r], q[r].tolist(), drafts[r].tolist(), int(seeds[r]), start)
        assert sampled[r].tolist() == wanted + [-1] * (steps + 1 - len(wanted))
        assert int(counts[r]) == len(wanted)


def test_a_run_repeats_and_does_not_depend_on_the_batch_around_it():
    warmth, seeds, starts = batch(50)
    drafts, probs = draft(DRAFTERS["unlike the target"][0], None, warmth, seeds, starts)
    together = verify(target_rows(drafts), drafts, probs, None, warmth, seeds, starts)
    for i in range(0, 50, 7):
        one = slice(i, i + 1)
        alone = verify(target_rows(drafts[one]), drafts[one], probs[one], None, warmth[one], seeds[one], starts[one])
        assert torch.equal(together[0][one], alone[0])
        assert torch.equal(together[1][one], alone[1])

"""Sampled decoding has the target's distribution, and repeats with its seeds."""

from __future__ import annotations

from dataclasses import replace

import torch
from specgraph.decoding import Request
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import MANY, decoder, generate, requests, target_logits
from specgraph_conformance.tiny_models import VOCAB


@case(
    "decoding.sampled-follows-the-target",
    "Sampled output has the target's distribution: chi-square of the second token against float64.",
    hazard="gumbel-seed-position",
    cause="draft noise and acceptance noise that are not independent, or the draft's probabilities taken for others",
    timeout=180,
)
def test_sampled(platform: Platform) -> None:
    expect_targets_distribution(platform, "eagle")


@case(
    "decoding.sampled-with-a-poor-drafter",
    "Sampled output has the target's distribution with a drafter that seldom agrees: chi-square against float64.",
    hazard="draft-probs-of-another-row",
    cause="a verify that is not given the drafter's distributions, or those of another request's drafts",
    timeout=180,
)
def test_poor_drafter(platform: Platform) -> None:
    expect_targets_distribution(platform, "eagle3")


def expect_targets_distribution(platform: Platform, kind: str) -> None:
    """Chi-square of the first two tokens of 450 requests."""
    prompt, draws, temperature = [5, 9, 2], 450, 1.3
    asked = [
        Request(prompt_token_ids=prompt, max_tokens=3, temperature=temperature, seed=1000 + i) for i in range(draws)
    ]
    with decoder(
        platform, kind=kind, sampled=True, k=2, max_num_requests=16, capture_sizes=(16,), max_model_len=32
    ) as made:
        results = generate(made, asked)
        accepted, drafted = sum(made.metrics.accepted), made.metrics.num_drafts
        assert accepted > draws // 10, f"only {accepted} of {2 * drafted} draft tokens were accepted"
        assert accepted < 2 * drafted, "every draft token was accepted, whatever target and drafter think of it"
    first = (target_logits(prompt, [])[-1] / temperature).softmax(-1)
    second = torch.zeros(VOCAB, dtype=torch.float64)
    for token, probability in enumerate(first.tolist()):
        second += probability * (target_logits(prompt, [token])[-1] / temperature).softmax(-1)
    for position, wanted in ((0, first), (1, second)):
        tokens = torch.tensor([result[position] for result in results])
        counts = tokens.bincount(minlength=VOCAB).double()
        order = wanted.argsort(descending=True)
        likely = order[: max(2, int((wanted * draws >= 8).sum()))]
        got = torch.cat([counts[likely], (draws - counts[likely].sum())[None]])
        expected = torch.cat([wanted[likely] * draws, ((1 - wanted[likely].sum()) * draws).clamp(min=1e-9)[None]])
        freedom = len(got) - 1
        chi_square = float(((got - expected) ** 2 / expected).sum())
        limit = freedom + 4 * (2 * freedom) ** 0.5 + 6  # beyond p = 1e-4 for these degrees of freedom
        assert chi_square < limit, f"token {position}: chi-square {chi_square:.1f}, {freedom} degrees of freedom"


@case(
    "decoding.sampled-repeats",
    "A sampled request repeats with its seed, whichever requests share the batch, and changes with another seed.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the row, the round or the padding",
)
def test_repeats(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=11, temperatures=(1.0, 0.5, 0.0, 2.0))
    with decoder(platform, sampled=True, **MANY) as made:
        first = generate(made, asked)
        assert generate(made, asked[::-1])[::-1] == first
        others = [replace(r, seed=r.seed + 50) for r in asked]
        assert generate(made, others) != first

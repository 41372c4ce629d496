"""Sampled decoding has the target's distribution, and the same seeds give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import (
    MANY,
    decoder,
    expect_targets_logprobs,
    generate,
    logits_of,
    requests,
)
from specgraph_conformance.draft_comparison import TOLERANCE
from specgraph_conformance.tiny_models import VOCAB

WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"k": 3, "tree": DraftTree(num_steps=3, top_k=2, num_draft_tokens=8)},
}
"""Options of `decoder`, by the way in which drafts are verified in a graph."""


@case(
    "decoding.sampled-follows-the-target",
    "Sampled output has the target's distribution: chi-square against float64.",
    hazard="draft-probs-of-another-row",
    cause="draft noise and acceptance noise that are not independent, or a verify that is not given the drafter's "
    "distributions, or those of another request's drafts",
    timeout=180,
)
def test_sampled(platform: Platform) -> None:
    expect_targets_distribution(platform)


@case(
    "decoding.top-k-of-a-draft",
    "With top_k and draft trees, sampled output has the distribution of the target's k most likely tokens.",
    cause="parameters of another request, or drafts accepted by the distribution without the parameters",
    timeout=180,
)
def test_top_k(platform: Platform) -> None:
    expect_targets_distribution(platform, top_k=3, sampling_parameters=True, **WAYS["tree"])


@pytest.mark.parametrize(("way", "biased"), [*((way, "another-token-each") for way in WAYS), ("chain", "token-0")])
@case(
    "decoding.penalties-of-the-output",
    "Greedy tokens are the best ones of float64 logits after bias and penalties, whose counts are kept on the device; "
    "what a round did not sample counts for no token.",
    hazard="unsampled-counted",
    cause="tokens of the output that are not counted, counted twice, or counted for the row's last owner; or the "
    "places after the sampled tokens of a round, -1, are counted as token 0",
)
def test_penalties(platform: Platform, way: str, biased: str, seed: int) -> None:
    asked = [
        replace(
            request,
            frequency_penalty=1.5,
            presence_penalty=0.5 * (i % 3),
            logit_bias={0: 12.0} if biased == "token-0" else {i: 1.0},
        )
        for i, request in enumerate(requests(seed, count=6, tokens=14))
    ]
    with decoder(platform, sampling_parameters=True, **WAYS[way]) as made:
        expect_best_after_penalties(made, asked, generate(made, asked))


@pytest.mark.parametrize("way", WAYS)
@case(
    "decoding.logprobs-of-the-target",
    "Each generated token has a log-probability, that of the target's float64 logits before bias, penalties and "
    "temperature, also where a stop token cuts a round.",
    hazard="logprobs-of-other-logits",
    cause="logits after the parameters, rows of other nodes of a tree, or more values than tokens after a cut",
)
def test_logprobs(platform: Platform, way: str, seed: int) -> None:
    asked = [
        replace(
            request,
            temperature=(0.0, 0.9)[i % 2],
            frequency_penalty=1.0,
            logit_bias={i: 2.0},
            stop_token_ids=[10 * i, 10 * i + 5],
        )
        for i, request in enumerate(requests(seed, count=6, tokens=14))
    ]
    with decoder(platform, sampled=True, sampling_parameters=True, logprobs=True, **WAYS[way]) as made:
        expect_targets_logprobs(made, asked, made.generate(asked))


def expect_best_after_penalties(
    made: SpeculativeDecoder, asked: Sequence[Request], results: Sequence[Sequence[int]]
) -> None:
    """Check that each token has the best float64 logit after its request's bias and penalties, up to ties."""
    for request, tokens in zip(asked, results, strict=True):
        logits = logits_of(made, request, tokens)
        for place, token in enumerate(tokens):
            counts = torch.tensor(tokens[:place], dtype=torch.int64).bincount(minlength=VOCAB)
            scores = logits[place] - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)
            for biased, value in request.logit_bias.items():
                scores[biased] += value
            short = float(scores.max() - scores[token])
            assert short < TOLERANCE[made.target.model.dtype], (
                f"output token {place} is {token}, {short:.3f} short of the best"
            )


def expect_targets_distribution(platform: Platform, top_k: int = 0, **options: Any) -> None:
    """Check by chi-square how often the target's most likely token is sampled, its second one, and so on, after 600
    prefixes."""
    temperature = 1.3
    asked = [replace(each, temperature=temperature, top_k=top_k) for each in requests(7, count=30, tokens=23)]
    sizes: dict[str, Any] = {"k": 2, "max_num_requests": 15, "capture_sizes": (15,)}
    with decoder(platform, sampled=True, **sizes | options) as made:
        results = generate(made, asked)
        accepted, drafted = sum(made.metrics.accepted), made.metrics.num_drafts * made.config.num_speculative_tokens
        assert accepted > drafted // 10, f"only {accepted} of {drafted} draft tokens were accepted"
        assert accepted < drafted, "every draft token was accepted, whatever target and drafter think of it"
        logits = torch.cat([logits_of(made, *pair) for pair in zip(asked, results, strict=True)])
    best = logits.sort(descending=True)
    likely = (best.values[:, : top_k or VOCAB] / temperature).softmax(-1).sum(0)
    places = (best.indices == torch.tensor([token for tokens in results for token in tokens])[:, None]).nonzero()[:, 1]
    counts, bins = places.bincount(minlength=VOCAB).double(), max(2, int((likely >= 8).sum()))
    got = torch.cat([counts[:bins], counts[bins:].sum()[None]])
    expected = torch.cat([likely[:bins], likely[bins:].sum().clamp(min=1e-9)[None]])
    chi_square = float(((got - expected) ** 2 / expected).sum())
    limit = bins + 4 * (2 * bins) ** 0.5 + 6  # beyond p = 1e-4 for these degrees of freedom
    assert chi_square < limit, f"chi-square {chi_square:.1f}, {bins} degrees of freedom"


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
        others = [replace(r, seed=1000 + i) for i, r in enumerate(asked)]
        assert generate(made, others) != first

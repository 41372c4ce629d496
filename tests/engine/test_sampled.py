"""Sampled speculative decoding follows the target's distribution, and repeats for a seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from goodness_of_fit import follows

from specgraph import ops
from specgraph.engine import Request

PROMPT, LENGTH, SMALL = [3], 4, 6


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def warm(requests: list[Request], temperature: float = 0.9) -> list[Request]:
    return [replace(request, temperature=temperature, seed=7 * i) for i, request in enumerate(requests)]


@pytest.mark.parametrize("head", ["eagle3", "shadow", None])
def test_a_seed_repeats_whatever_the_batch(request, make_decoder, requests, head):
    head = head and request.getfixturevalue(head)
    query_len = None if head else 4
    decoder = make_decoder(head, sampled=True, capture_sizes=[4], query_len=query_len)
    together = tokens(decoder.generate(warm(requests)))
    assert tokens(decoder.generate(warm(requests))) == together
    assert tokens(decoder.generate(list(reversed(warm(requests))))) == list(reversed(together))
    assert [tokens(decoder.generate([one]))[0] for one in warm(requests)] == together
    others = [replace(one, seed=one.seed + 1) for one in warm(requests)]
    assert sum(a != b for a, b in zip(tokens(decoder.generate(others)), together, strict=True)) >= len(requests) - 1


@pytest.mark.parametrize(
    ("lowering", "attention", "draft_sampling"),
    [("step", "device", "sampled"), ("merged", "host", "sampled"), ("merged", "device", "greedy")],
)
def test_every_lowering_samples_the_same_tokens(make_decoder, requests, shadow, lowering, attention, draft_sampling):
    """Greedy drafts keep no distribution, and a request at temperature 0 gets what a greedy decoder gives it."""
    config = {"sampled": True, "capture_sizes": [4], "draft_sampling": draft_sampling}
    eager = make_decoder(shadow, **config)
    wanted = tokens(eager.generate(warm(requests, 0.5)))
    decoder = make_decoder(shadow, decode=lowering, attention=attention, **config)
    assert tokens(decoder.generate(warm(requests, 0.5))) == wanted
    assert decoder.metrics == eager.metrics
    assert decoder.metrics.accepted[1] > 0
    assert (decoder.drafter.buffers.draft_probs is None) is (draft_sampling == "greedy")
    assert tokens(decoder.generate(requests)) == tokens(make_decoder(shadow, capture_sizes=[4]).generate(requests))


def test_temperature_zero_is_greedy_also_beside_warm_requests(make_decoder, requests, shadow):
    greedy = tokens(make_decoder(shadow, capture_sizes=[4]).generate(requests))
    mixed = [r if i % 2 else replace(r, temperature=1.0, seed=i) for i, r in enumerate(requests)]
    got = tokens(make_decoder(shadow, sampled=True, capture_sizes=[4]).generate(mixed))
    assert got[1::2] == greedy[1::2]
    assert got[::2] != greedy[::2]


def joint(model, temperature: float) -> torch.Tensor:
    """Probability of every continuation of PROMPT by LENGTH tokens, by transformers: float64 [SMALL ** LENGTH]."""
    prefixes, probability = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        logits = model(prefixes).logits[:, -1].double()
        probability = (probability[:, None] * torch.softmax(logits / temperature, dim=-1)).flatten()
        following = torch.arange(SMALL).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(SMALL, dim=0), following], dim=1)
    return probability


@pytest.fixture(scope="module")
def small_model(small_pair_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(small_pair_folder / "target", dtype=torch.float32).eval()


def counts(decoder, temperature: float, n: int) -> torch.Tensor:
    """How often each continuation came out, over `n` seeds."""
    requests = [
        Request(prompt_token_ids=PROMPT, max_tokens=LENGTH, temperature=temperature, seed=seed) for seed in range(n)
    ]
    drawn = torch.tensor(tokens(decoder.generate(requests)))
    place = SMALL ** torch.arange(LENGTH - 1, -1, -1)
    return torch.bincount((drawn * place).sum(1), minlength=SMALL**LENGTH)


@pytest.fixture
def small_decoder(make_decoder, small_pair):
    return make_small(make_decoder, small_pair)


def make_small(make_decoder, small_pair, **config):
    target, head = small_pair
    return make_decoder(head, target=target, num_speculative_tokens=2, sampled=True, max_num_requests=64, **config)


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["sampled", "greedy"])
def test_the_output_follows_the_targets_distribution(make_decoder, small_pair, small_model, draft_sampling):
    small_decoder, temperature = make_small(make_decoder, small_pair, draft_sampling=draft_sampling), 0.5
    got = counts(small_decoder, temperature, 1_000)
    assert 0 < small_decoder.metrics.accepted[1] < small_decoder.metrics.num_drafts
    assert follows(got, joint(small_model, temperature))
    assert not follows(got, joint(small_model, temperature * 1.25))


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["accepts everything", "stale distributions", "drafts at another temperature"])
def test_a_biased_decoder_goes_red(small_decoder, small_model, bias, monkeypatch):
    if bias == "drafts at another temperature":
        draft = ops.draft_from_hidden

        def hotter(hidden, head, drafts, draws):
            draft(hidden, head._replace(weight=head.weight * 0.3), drafts, draws)
            draws.draft_probs.fill_(0.25)  # and reports other probabilities

        monkeypatch.setattr(ops, "draft_from_hidden", hotter)
    else:
        verify = ops.verify_drafts

        def biased(logits, drafts, starts, acceptance, sampled):
            probs = acceptance.draft_probs
            wrong = torch.zeros_like(probs) if bias == "accepts everything" else probs.roll(1, dims=0)
            verify(logits, drafts, starts, acceptance._replace(draft_probs=wrong), sampled)

        monkeypatch.setattr(ops, "verify_drafts", biased)
    assert not follows(counts(small_decoder, 0.5, 400), joint(small_model, 0.5))

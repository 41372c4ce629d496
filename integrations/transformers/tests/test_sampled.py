"""Sampled output follows the distribution that `generate` draws from."""

from __future__ import annotations

import pytest
import torch
from goodness_of_fit import follows
from specgraph_transformers import speculative
from tiny_targets import VOCAB, make_prompts, make_target
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

REQUESTS, NEW = 512, 3
WARPERS = {
    "min_p": {"min_p": 0.1, "temperature": 0.9},
    "others": {"temperature": 1.3, "top_k": 4, "top_p": 0.7},
}
NAMES = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@pytest.fixture(scope="module")
def model():
    """Scaled down, so that many tokens are likely."""
    made = make_target("Llama")
    with torch.no_grad():
        made.lm_head.weight.mul_(0.4)
    return made


@pytest.fixture(scope="module")
def draft(eagle3):
    made = speculative(
        eagle3, 2, max_num_requests=REQUESTS, max_model_len=32, capture_sizes=[1, REQUESTS], prefill_sizes=[8]
    )
    yield made
    made.close()


def exact(model, prompt, options) -> torch.Tensor:
    """Probability of every continuation of NEW tokens, [VOCAB ** NEW], from the model's logits after each prefix."""
    warpers = LogitsProcessorList([NAMES[name](options[name]) for name in NAMES if name in options])
    probabilities = torch.ones((), dtype=torch.float64)
    prefixes = prompt[None]
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(prefixes).logits[:, -1]
        rows = torch.softmax(warpers(prefixes, logits.float()).double(), dim=-1)
        probabilities = (probabilities.reshape(-1, 1) * rows).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), tokens], dim=1)
    return probabilities


@pytest.mark.parametrize("name", WARPERS)
def test_the_distribution_of_what_is_generated(name, model, draft):
    """Chi-square over all continuations of three tokens: the first is drawn after the prompt, the others in rounds."""
    options = {"top_k": 0, **WARPERS[name]}
    prompt, _ = make_prompts(4, seed=3)
    torch.manual_seed(11)
    before = draft.metrics.num_drafts, sum(draft.metrics.accepted)
    out = model.generate(
        prompt.expand(REQUESTS, -1), max_new_tokens=NEW, do_sample=True, custom_generate=draft, **options
    )
    places = (out[:, 4:] * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    given = {key: value for key, value in options.items() if key != "top_k" or value}
    assert follows(torch.bincount(places, minlength=VOCAB**NEW).tolist(), exact(model, prompt[0], given).tolist())
    drafts, accepted = draft.metrics.num_drafts - before[0], sum(draft.metrics.accepted) - before[1]
    assert 0 < accepted < 2 * drafts


def test_a_seed_repeats(model, draft):
    prompt, _ = make_prompts(5, seed=4)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(prompt, max_new_tokens=20, do_sample=True, custom_generate=draft).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_greedy_calls_of_a_sampled_drafter(model, draft):
    prompt, _ = make_prompts(6, seed=5)
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(prompt, custom_generate=draft, **options), model.generate(prompt, **options))

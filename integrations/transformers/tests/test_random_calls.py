"""Random calls give what `generate` gives without a drafter; sampling from one token is deterministic."""

from __future__ import annotations

import random

import pytest
import torch
from specgraph_transformers import speculative
from tiny_targets import PAD, make_prompts, make_target


@pytest.fixture(scope="module")
def model():
    return make_target("Llama")


def random_call(rng: random.Random) -> dict:
    """Options of one `generate`: penalties and lengths that differ by request, and few or many new tokens."""
    options = {"max_new_tokens": rng.randint(1, 9), "pad_token_id": PAD, "do_sample": rng.random() < 0.5}
    if options["do_sample"]:
        options |= {"top_k": 1, "temperature": rng.choice([0.5, 1.0, 2.0])}
    if rng.random() < 0.6:
        options["repetition_penalty"] = rng.choice([0.3, 1.7])
    if rng.random() < 0.3:
        options |= {"eos_token_id": rng.randrange(PAD), "min_new_tokens": rng.randint(0, options["max_new_tokens"])}
    return options


@pytest.mark.parametrize("seed", range(3))
def test_output_is_that_of_generate(model, eagle3, seed):
    """A drafter of a random K meets a short first call, then longer ones, with unequal left padding."""
    rng = random.Random(seed)
    draft = speculative(
        eagle3, rng.randint(1, 15), prefill_sizes=[rng.choice([4, 16])], max_num_requests=3, capture_sizes=[3]
    )
    for _ in range(3):
        ids, mask = make_prompts(*(rng.randint(1, 12) for _ in range(rng.randint(1, 3))), seed=rng.randrange(99))
        options = random_call(rng)
        torch.manual_seed(seed)
        plain = model.generate(ids, attention_mask=mask, **options)
        drafted = model.generate(ids, attention_mask=mask, custom_generate=draft, **options)
        assert drafted.tolist() == plain.tolist(), options
    draft.close()


@pytest.mark.parametrize(("k", "prompt", "new"), [(5, 3, 5), (9, 30, 60), (5, 2, 1)])
def test_first_call(model, eagle3, k, prompt, new):
    """The first call sets the longest text: as few tokens as K, and more blocks than the prompt's passes use."""
    draft = speculative(eagle3, k, prefill_sizes=[4])
    ids, mask = make_prompts(prompt)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
    drafted = model.generate(ids, attention_mask=mask, custom_generate=draft, **options)
    assert drafted.tolist() == model.generate(ids, attention_mask=mask, **options).tolist()
    draft.close()

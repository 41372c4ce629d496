"""Drafts that follow the sampling parameters of their request are accepted as often as the exact share says."""

from __future__ import annotations

import pytest
import torch
from goodness_of_fit import follows
from served_distribution import served
from specgraph_models.checkpoints import load_target
from specgraph_models.draft_model import DraftModelHead
from specgraph_run.decoder import Request
from tiny_checkpoints import write_target

VOCAB, PROMPT, K = 8, [3, 1], 2
ASKED = {"temperature": 2.0, "top_p": 0.6, "frequency_penalty": 3.0, "logit_bias": {2: 2.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"), vocab=VOCAB)


@pytest.fixture(scope="module")
def models(folder):
    """The target and a disturbed copy of it that drafts, by transformers; and the disturbed vocabulary head."""
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, drafter = (load(folder, dtype=torch.float32).eval() for _ in range(2))
    weight = drafter.lm_head.weight.data
    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.15)
    return target, drafter, weight


def accepted_shares(models, asked: dict, drafted: dict) -> list[float]:
    """Probability that 0, 1 and 2 of the first two drafts after the first token are accepted.

    The chance that token x is drafted and accepted is min(p(x), q(x)).

    Args:
        asked: the request's parameters, which make p of the target's logits.
        drafted: the parameters that make q of the drafter's logits.
    """
    target, drafter, _ = models

    def shares(model, output, parameters):
        return served(model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].tolist(), PROMPT, output, **parameters)

    reached = [0.0] * K
    for first, chance in enumerate(shares(target, [], asked)):
        paths = {(first,): chance}
        for step in range(K):
            longer = {}
            for output, probability in paths.items():
                if probability:
                    both = zip(shares(target, output, asked), shares(drafter, output, drafted), strict=True)
                    longer |= {(*output, token): probability * min(p, q) for token, (p, q) in enumerate(both)}
            paths = longer
            reached[step] += sum(paths.values())
    return [1 - reached[0], reached[0] - reached[1], reached[1]]


@pytest.mark.slow
def test_drafts_are_accepted_as_often_as_two_filtered_distributions_overlap(make_decoder, folder, models):
    """More often than drafts drawn by temperature alone, which the same check tells from them."""
    asked, n = ASKED, 300
    model = load_target(folder)
    model.weights()["lm_head"].copy_(models[2])
    decoder = make_decoder(
        DraftModelHead(model, model.hidden_size), target=load_target(folder), num_speculative_tokens=K,
        max_num_requests=64, sampled=True, sampling_parameters=True,
    )  # fmt: skip
    decoder.generate([Request(prompt_token_ids=PROMPT, max_tokens=2, seed=seed, **asked) for seed in range(n)])
    assert decoder.metrics.num_drafts == n
    first, second = decoder.metrics.accepted
    drafts = [n - first, first - second, second]
    follow = accepted_shares(models, asked, asked)
    by_temperature = accepted_shares(models, asked, {"temperature": asked["temperature"]})
    assert follow[0] < by_temperature[0] - 0.1
    assert follows(drafts, follow)
    assert not follows(drafts, by_temperature)

"""Sampling parameters under speculation: the output follows the distribution that they define, for each request of a
batch."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from goodness_of_fit import follows
from served_distribution import served
from specgraph_run import load_generator
from specgraph_run.decoder import DecoderOptions, Request
from specgraph_run.decoder.joining import _write_sampling as write_sampling
from specgraph_run.decoder.request import UNSUPPORTED
from specgraph_run.decoder.sampling_buffers import allocate_sampling

from specgraph.draft import DraftTree
from specgraph.errors import ConfigError

PROMPT, LENGTH, SMALL = [3, 1], 3, 6
MIXED = [
    {"temperature": 3.0, "top_k": 3},
    {"temperature": 4.0, "top_p": 0.5, "frequency_penalty": -2.0},
    {"temperature": 3.0, "min_p": 0.3, "logit_bias": {2: 4.0, 0: -2.0}},
    {"temperature": 3.0, "repetition_penalty": 1.8, "presence_penalty": 8.0},
]
SETTINGS = {
    "sampled": True, "sampling_parameters": True, "max_num_requests": 64, "decode": "merged", "capture_sizes": [64],
    "prefill": "full", "prefill_sizes": [4], "num_speculative_tokens": 2,
    "tree": DraftTree(num_steps=2, top_k=2, num_draft_tokens=5),
}  # fmt: skip


@pytest.fixture(scope="module")
def small_model(small_pair_folder):
    """transformers' logits after PROMPT and some tokens."""
    transformers = pytest.importorskip("transformers")
    folder = small_pair_folder / "target"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @cache
    def logits(output: tuple[int, ...]) -> list[float]:
        return model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].double().tolist()

    return logits


def joint(model, temperature, **asked) -> torch.Tensor:
    """Probability of every continuation of PROMPT by LENGTH tokens, by transformers and `served`: float64."""
    every: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in every.items():
            for token, share in enumerate(served(model(output), PROMPT, output, temperature, **asked)):
                longer[(*output, token)] = probability * share
        every = longer
    return torch.tensor([every[each] for each in itertools.product(range(SMALL), repeat=LENGTH)], dtype=torch.float64)


def counts(results) -> torch.Tensor:
    place = SMALL ** torch.arange(LENGTH - 1, -1, -1)
    drawn = torch.tensor([result.token_ids for result in results])
    return torch.bincount((drawn * place).sum(1), minlength=SMALL**LENGTH)


def mixed_batch(n: int) -> list[Request]:
    """The parameters of MIXED in turn, so that each batch holds all of them."""
    return [
        Request(prompt_token_ids=PROMPT, max_tokens=LENGTH, seed=i, **parameters)
        for i in range(n)
        for parameters in MIXED
    ]


@pytest.mark.slow
def test_mixed_parameters_in_one_batch_follow_their_distributions(make_decoder, small_pair, small_model):
    """With trees; chains draw from such distributions in specgraph-transformers' tests, against `generate`."""
    target, head = small_pair
    decoder = make_decoder(head, target=target, **SETTINGS)
    results = decoder.generate(mixed_batch(160))
    assert 0 < decoder.metrics.accepted[1] < decoder.metrics.num_drafts
    for place, parameters in enumerate(MIXED):
        got = counts(results[place :: len(MIXED)])
        assert follows(got, joint(small_model, **parameters))
        assert not follows(got, joint(small_model, temperature=parameters["temperature"]))


def test_every_token_of_the_prompt_is_penalised():
    """The last one too, and none of the request before in the row."""
    row = allocate_sampling(1, 12, torch.device("cpu"))
    for prompt in ([9, 1, 2], [3, 7, 3, 11]):
        write_sampling(row, Request(prompt_token_ids=prompt, max_tokens=1, repetition_penalty=1.5))
        assert set(row.in_prompt[0].nonzero().flatten().tolist()) == set(prompt)


def test_parameters_without_a_decoder_for_them_are_refused_by_name(make_decoder, eagle3):
    decoder = make_decoder(eagle3, sampled=True)
    with pytest.raises(ConfigError, match=r"top_p 0\.9: .*load it with sampling_parameters=True"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=2, temperature=1.0, top_p=0.9))
    with pytest.raises(ConfigError, match="logit_bias"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=2, logit_bias={3: 1.0}))


def test_parameters_of_the_text_generator():
    """Parameters of a server that have no lossless meaning here are refused by name; top_p goes through."""
    generator = load_generator(
        platform="cpu", max_model_len=64, prefill_sizes=[16], decode="eager", sampled=True, sampling_parameters=True
    )
    for name in (*UNSUPPORTED, "colour"):
        with pytest.raises(ConfigError, match=f"'{name}' is not supported: "):
            generator.request("x", **{name: 2})
    with pytest.raises(ConfigError, match=r"'max_token' is not supported: .*; did you mean max_tokens by 'max_token'"):
        generator.request("x", max_token=2)
    request = generator.request("def f(", max_tokens=5, temperature=1.0, top_p=1e-6)
    greedy = generator.request("def f(", max_tokens=5)
    first, second = generator.generate([request, greedy])
    assert first.token_ids == second.token_ids
    alone = [
        generator.text(prompt, max_tokens=5, temperature=0.9, seed=seed)[0] for prompt in ("x", "y") for seed in (3, 4)
    ]
    with pytest.warns(UserWarning, match="4 sequences are generated 1 at a time"):
        assert generator.text(["x", "y"], n=2, max_tokens=5, temperature=0.9, seed=3) == alone
    with pytest.raises(ConfigError, match="n 2 needs a temperature above 0"):
        generator.requests("x", n=2)
    with pytest.raises(ConfigError, match="n must be at least 1, got 0"):
        generator.text("x", n=0, temperature=1.0)
    generator.close()


def test_a_bias_outside_the_vocabulary_is_refused(make_decoder, eagle3):
    decoder = make_decoder(eagle3, sampling_parameters=True)
    with pytest.raises(ConfigError, match="logit_bias names token 96, the target's vocabulary has 96"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=2, logit_bias={96: 1.0}))


@pytest.mark.parametrize("name", ["sampling_parameters", "logprobs"])
def test_what_does_not_work_together_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is about the target's tokens"):
        DecoderOptions(synthetic_acceptance=0.5, **{name: True})

"""Sampling parameters under speculation: the output follows the distribution that they define, for each request of a
batch, and logprobs are those of the target."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from goodness_of_fit import follows
from served_distribution import served

from specgraph import ConfigError, load_generator, ops
from specgraph.draft import DraftTree
from specgraph.engine import EngineConfig, Request
from specgraph.engine.request import UNSUPPORTED

PROMPT, LENGTH, SMALL = [3, 1], 3, 6
MIXED = [
    {"temperature": 3.0, "top_k": 3},
    {"temperature": 4.0, "top_p": 0.7, "frequency_penalty": -2.0},
    {"temperature": 3.0, "min_p": 0.3, "logit_bias": {2: 4.0, 0: -2.0}},
    {"temperature": 3.0, "repetition_penalty": 1.8, "presence_penalty": 4.0},
]
ROUND = {"decode": "round", "capture_sizes": [4, 64]}
TREE = {"num_speculative_tokens": 2, "tree": DraftTree(num_steps=2, top_k=2, num_draft_tokens=5)}
LARGER = {"num_speculative_tokens": 3, "tree": DraftTree(num_steps=3, top_k=4, num_draft_tokens=16)}
SETTINGS = {"sampled": True, "sampling_parameters": True, "max_num_requests": 64, "num_speculative_tokens": 2}


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
@pytest.mark.parametrize("way", ["round", "tree"])
def test_mixed_parameters_in_one_batch_follow_their_distributions(make_decoder, small_pair, small_model, way):
    target, head = small_pair
    changes = {"round": {**ROUND, "draft_sampling": "greedy"}, "tree": TREE}[way]
    decoder = make_decoder(head, target=target, **SETTINGS | changes)
    results = decoder.generate(mixed_batch(300))
    assert 0 < decoder.metrics.accepted[1] < decoder.metrics.num_drafts
    for place, parameters in enumerate(MIXED):
        got = counts(results[place :: len(MIXED)])
        assert follows(got, joint(small_model, **parameters))
        assert not follows(got, joint(small_model, temperature=parameters["temperature"]))


ASKED = [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0, "presence_penalty": 1.5}, {"logit_bias": {5: 4.0}}]


WAYS = {
    "eager": {},
    "merged": {"decode": "merged"},
    "round": {"decode": "round"},
    "round, read at once": {"decode": "round", "rounds_ahead": 0},
    "tree": {**LARGER, "decode": "merged"},
    "trees for up to 2 requests": {**LARGER, "decode": "merged", "draft_schedule": {2: "tree", 4: 3}},
    "round of trees": {**LARGER, "decode": "round"},
}


@pytest.fixture(scope="module")
def penalised(reference):
    """`penalised(requests)`: those of ASKED in turn, and the best token of each context of theirs, by transformers."""
    known: list[list[int]] = []

    def run(requests: list[Request]) -> tuple[list[Request], list[list[int]]]:
        batch = [replace(one, **ASKED[i % len(ASKED)]) for i, one in enumerate(requests)]
        for i, request in enumerate(batch if not known else ()):
            output: list[int] = []
            for _ in range(request.max_tokens):
                logits = reference(torch.tensor([[*request.prompt_token_ids, *output]])).logits[0, -1].tolist()
                best = served(logits, request.prompt_token_ids, output, 0.0, **ASKED[i % len(ASKED)])
                output.append(best.index(1.0))
            known.append(output)
        return batch, known

    return run


@pytest.mark.parametrize(
    ("way", "wrong"),
    [
        *((way, "") for way in WAYS),
        ("eager", "drafts not in the context"),
        ("eager", "output not counted"),
        ("tree", "a chain's context"),
    ],
)
def test_greedy_requests_with_penalties_take_the_best_token_of_each_context(
    make_decoder, requests, penalised, shadow, way, wrong, monkeypatch
):
    """Requests join and leave, so rows move; against transformers over the whole sequence each time."""
    real = ops.adjust_logits
    if wrong == "a chain's context":
        monkeypatch.setattr(ops, "adjust_logits", lambda *args: real(*args[:4]))
    elif wrong == "output not counted":
        monkeypatch.setattr(ops, "count_tokens", lambda *args: None)
    elif wrong:
        monkeypatch.setattr(
            ops, "adjust_logits", lambda *args: real(*args[:3], torch.full_like(args[3], -1), *args[4:])
        )
    batch, expected = penalised(requests)
    decoder = make_decoder(shadow, sampling_parameters=True, **WAYS[way])
    results = decoder.generate(batch)
    assert decoder.metrics.accepted[0] > 0
    assert ([result.token_ids for result in results] == expected) is not bool(wrong)


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_the_targets_own(make_decoder, requests, reference, shadow, way):
    decoder = make_decoder(shadow, sampled=True, logprobs=True, sampling_parameters=True, **WAYS[way])
    batch = [replace(one, temperature=0.8, top_p=0.9, seed=i) for i, one in enumerate(requests)]
    for request, result in zip(batch, decoder.generate(batch), strict=True):
        ids, first = [*request.prompt_token_ids, *result.token_ids], len(request.prompt_token_ids) - 1
        wanted = torch.log_softmax(reference(torch.tensor([ids])).logits[0, first:-1], -1)
        wanted = wanted.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), wanted, rtol=0, atol=1e-4)


def test_parameters_without_a_decoder_for_them_are_refused_by_name(make_decoder, eagle3):
    decoder = make_decoder(eagle3, sampled=True)
    with pytest.raises(ConfigError, match=r"top_p 0\.9 needs a decoder with config\.sampling_parameters"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=2, temperature=1.0, top_p=0.9))
    with pytest.raises(ConfigError, match="logit_bias"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=2, logit_bias={3: 1.0}))


def test_parameters_of_the_text_generator():
    """Those of a server that have no lossless meaning here are refused by name; top_p goes through."""
    generator = load_generator(
        platform="cpu", max_model_len=64, prefill_sizes=[16], decode="eager", sampled=True, sampling_parameters=True
    )
    for name in (*UNSUPPORTED, "colour"):
        with pytest.raises(ConfigError, match=f"'{name}' is not supported: "):
            generator.request("x", **{name: 2})
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
        EngineConfig(
            num_speculative_tokens=2,
            max_num_requests=1,
            max_model_len=32,
            block_size=4,
            synthetic_acceptance=0.5,
            **{name: True},
        )

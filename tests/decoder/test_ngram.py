"""Decoding with n-gram drafts where the conformance suite does not look: from folders, sampled, by K, with debug."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph_models.errors import CheckpointError
from specgraph_run.decoder import Request
from specgraph_run.text.load import load_generator

from specgraph.device import open_platform
from specgraph.draft.ngram import NgramHead
from specgraph.errors import ConfigError, UnsupportedError

HEAD = NgramHead(96, prompt_lookup_max=3)


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture
def repetitive(requests) -> list[Request]:
    """Requests whose texts repeat themselves."""
    return [replace(each, prompt_token_ids=list(each.prompt_token_ids)[:8] * 3, max_tokens=24) for each in requests]


@pytest.mark.parametrize(
    "options",
    [
        {"decode": "merged"},
        {"decode": "merged", "attention": "host"},
        {"decode": "step", "block_size": 1},
        {"decode": "merged", "k_candidates": [1, 3], "round_times": {4: {1: 10.0, 3: 11.0}}},
        {"decode": "merged", "draft_schedule": {1: 3, 2: 0, 4: 2}},
        {"decode": "merged", "debug": True, "rounds_ahead": 0, "check_inputs": True},
        {"decode": "eager", "sampling_parameters": True, "logprobs": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_greedy_output_is_the_targets(make_decoder, repetitive, target_alone, options):
    decoder = make_decoder(HEAD, **options)
    assert tokens(decoder.generate(repetitive)) == target_alone(repetitive)
    assert sum(decoder.metrics.accepted) >= 5
    assert decoder.metrics.rows_without_block == 0


def test_every_lowering_samples_the_same_tokens(make_decoder, repetitive):
    """N-gram drafts keep no distribution, also where sampled drafts are asked for."""
    warm = [replace(each, temperature=0.5, seed=i) for i, each in enumerate(repetitive)]
    eager = make_decoder(HEAD, sampled=True)
    wanted = tokens(eager.generate(warm))
    assert sum(eager.metrics.accepted) >= 5
    for lowering in ("step", "merged"):
        decoder = make_decoder(HEAD, sampled=True, decode=lowering)
        assert tokens(decoder.generate(warm)) == wanted
        assert decoder.metrics == eager.metrics
        assert decoder.drafter.buffers.draft_probs is None


def test_the_shipped_target_drafts_for_itself():
    """A loop is found at once: nearly all drafts are accepted, and the text is that of the target alone."""
    prompt = "x = [1, 2, 3]\n" * 8
    texts = []
    for options in ({"draft": "ngram"}, {"speculate": False}):
        generator = load_generator(platform=open_platform("cpu"), max_model_len=256, **options)
        request = Request(prompt_token_ids=generator.tokenizer.encode(prompt).ids, max_tokens=40)
        with torch.inference_mode():
            texts.append(tokens(generator.decoder.generate([request])))
        if "draft" in options:
            assert "drafter n-grams of 5 to 1 tokens" in generator.description
            assert generator.decoder.metrics.mean_acceptance_length > 3
        generator.close()
    assert texts[0] == texts[1]


def test_what_n_grams_cannot_do_is_refused(make_decoder):
    with pytest.raises(ConfigError, match="prompt_lookup_min 4 is more than prompt_lookup_max 3"):
        NgramHead(96, prompt_lookup_max=3, prompt_lookup_min=4)
    with pytest.raises(ConfigError, match="prompt_lookup_min 6 is more than prompt_lookup_max 5"):
        load_generator(draft="ngram", platform=open_platform("cpu"), prompt_lookup_min=6)
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    with pytest.raises(UnsupportedError, match="a NgramHead drafts chains: leave out the draft tree"):
        load_generator(draft="ngram", platform=open_platform("cpu"), max_model_len=64, **tree)
    with pytest.raises(CheckpointError, match="--draft ngram"):
        load_generator(draft="ngrams")

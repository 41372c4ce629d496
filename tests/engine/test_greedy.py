"""Greedy speculative decoding where the conformance suite does not look: transformers, block sizes, the null block."""

from __future__ import annotations

import pytest
import torch


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_the_target_alone_agrees_with_transformers(target_alone, requests, reference):
    results = target_alone(requests)
    for request, got in zip(requests, results, strict=True):
        logits = reference(torch.tensor([[*request.prompt_token_ids, *got]])).logits[0]
        assert logits[len(request.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == got
    assert [len(got) for got in results] == [request.max_tokens for request in requests]


@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes_change_nothing(make_decoder, requests, shadow, target_alone, block_size):
    assert tokens(make_decoder(shadow, block_size=block_size).generate(requests)) == target_alone(requests)


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_nothing_ever_writes_to_the_null_block(make_decoder, requests, shadow, lowering):
    decoder = make_decoder(shadow, decode=lowering)
    decoder.generate(requests)
    for cache in (*decoder.target.caches, *decoder.drafter.caches):
        assert not cache.key[0].any()
        assert not cache.value[0].any()
        assert cache.key[1:].any()

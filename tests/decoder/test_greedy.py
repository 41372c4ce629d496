"""Greedy speculative decoding where the conformance suite does not look: transformers, block sizes, the null block."""

from __future__ import annotations

import pytest
import torch


def test_the_target_alone_agrees_with_transformers(target_alone, requests, reference):
    results = target_alone(requests)
    for request, got in zip(requests, results, strict=True):
        logits = reference(torch.tensor([[*request.prompt_token_ids, *got]])).logits[0]
        assert logits[len(request.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == got
    assert [len(got) for got in results] == [request.max_tokens for request in requests]


@pytest.mark.parametrize(("block_size", "lowering"), [(1, "merged"), (64, "eager")])
def test_block_sizes_change_nothing(make_decoder, requests, shadow, target_alone, block_size, lowering):
    """And nothing ever writes to the null block."""
    decoder = make_decoder(shadow, block_size=block_size, decode=lowering)
    assert [result.token_ids for result in decoder.generate(requests)] == target_alone(requests)
    for cache in (*decoder.target.caches, *decoder.drafter.caches):
        assert not cache.key[0].any()
        assert not cache.value[0].any()
        assert cache.key[1:].any()

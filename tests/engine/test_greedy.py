"""Greedy speculative decoding where the conformance suite does not look: transformers, block sizes, the null block."""

from __future__ import annotations

import pytest
import torch


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_the_target_alone_agrees_with_transformers(make_decoder, requests, reference):
    results = tokens(make_decoder(None).generate(requests))
    for request, got in zip(requests, results, strict=True):
        ids = list(request.prompt_token_ids)
        for token in got:
            logits = reference(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)
    assert [len(got) for got in results] == [request.max_tokens for request in requests]


@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes_change_nothing(make_decoder, requests, shadow, block_size):
    wanted = tokens(make_decoder(shadow).generate(requests))
    assert tokens(make_decoder(shadow, block_size=block_size).generate(requests)) == wanted


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_nothing_ever_writes_to_the_null_block(make_decoder, requests, shadow, lowering):
    decoder = make_decoder(shadow, decode=lowering)
    decoder.generate(requests)
    for cache in (*decoder.target.caches, *decoder.drafter.caches):
        assert not cache.key[0].any()
        assert not cache.value[0].any()
        assert cache.key[1:].any()

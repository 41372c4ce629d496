"""Greedy speculative decoding gives the target's own tokens, however it drafts, batches and waits."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from random_prompts import prompt

from specgraph.engine import Request


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture
def by_target(make_decoder, requests):
    """`by_target(q)`: the target alone, one token per round, in passes of q rows per request at 4 requests."""

    def run(query_len: int) -> list[list[int]]:
        return tokens(make_decoder(None, query_len=query_len, capture_sizes=[4]).generate(requests))

    return run


def test_the_target_alone_agrees_with_transformers(make_decoder, requests, reference):
    results = tokens(make_decoder(None).generate(requests))
    for request, got in zip(requests, results, strict=True):
        ids = list(request.prompt_token_ids)
        for token in got:
            logits = reference(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)
    assert [len(got) for got in results] == [request.max_tokens for request in requests]


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("head", ["eagle3", "shadow"])
def test_equal_to_the_target_alone(request, make_decoder, requests, by_target, steps, head):
    decoder = make_decoder(request.getfixturevalue(head), num_speculative_tokens=steps, capture_sizes=[4])
    assert tokens(decoder.generate(requests)) == by_target(steps + 1)
    if head == "shadow":
        accepted = decoder.metrics.accepted
        assert 0 < accepted[0] < decoder.metrics.num_drafts  # some are kept, some are rejected at once
        assert accepted[min(steps, 3) - 1] > 0


@pytest.mark.parametrize("attention", ["device", "host"])
@pytest.mark.parametrize("lowering", ["step", "merged", "piecewise"])
def test_every_lowering_gives_the_tokens_and_the_acceptance_of_eager(
    make_decoder, requests, by_target, shadow, lowering, attention
):
    settings = {"num_speculative_tokens": 2, "capture_sizes": [4], "rounds_ahead": 0}  # as with host lengths
    eager = make_decoder(shadow, **settings)
    wanted = tokens(eager.generate(requests))
    decoder = make_decoder(shadow, decode=lowering, attention=attention, check_inputs=True, **settings)
    captured = decoder.drafter.graphs.descriptors, decoder.target.graphs.descriptors
    assert tokens(decoder.generate(requests)) == wanted == by_target(3)
    assert decoder.metrics == eager.metrics
    assert (decoder.drafter.graphs.descriptors, decoder.target.graphs.descriptors) == captured
    assert decoder.drafter.graphs.launches > 0


def drafts_by_place(decoder, requests) -> dict[int, dict[int, list[int]]]:
    """The draft tokens that each request's verify saw, by request and by position of its last token."""
    seen: dict[int, dict[int, list[int]]] = defaultdict(dict)
    verify = decoder.target.verify

    def spy(*args) -> None:
        for state in decoder.rounds.running:
            prompt = state.request.prompt_token_ids
            position = int(decoder.target.round.start_positions[state.row])
            drafts = decoder.target.verify_program.sliced(4, 4).draft_token_ids[state.row]
            seen[prompt[0] * 1000 + len(prompt)][position] = drafts.tolist()
        verify(*args)

    decoder.target.verify = spy
    decoder.generate(requests)
    return dict(seen)


@pytest.mark.parametrize("head", ["eagle3", "shadow"])
def test_drafts_too_are_the_same_alone_and_in_a_batch(request, make_decoder, requests, head):
    """Also those of requests that join while others run: drafts that nobody compares only cost acceptance."""
    head = request.getfixturevalue(head)
    settings = {"capture_sizes": [4], "rounds_ahead": 0}  # no round for a request that has ended
    together = drafts_by_place(make_decoder(head, **settings), requests)
    alone: dict[int, dict[int, list[int]]] = {}
    for one in requests:
        alone |= drafts_by_place(make_decoder(head, **settings), [one])
    assert together == alone


def test_prompts_prefilled_in_chunks_give_the_same(make_decoder, requests, shadow, eagle3):
    for head in (shadow, eagle3):
        whole = make_decoder(head, capture_sizes=[4])
        wanted, drafts = tokens(whole.generate(requests)), whole.metrics
        for chunk in (1, 7):
            decoder = make_decoder(head, capture_sizes=[4], prefill_chunk=chunk)
            assert tokens(decoder.generate(requests)) == wanted
            assert decoder.metrics == drafts


@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes_change_nothing(make_decoder, requests, shadow, block_size):
    wanted = tokens(make_decoder(shadow, capture_sizes=[4]).generate(requests))
    assert tokens(make_decoder(shadow, capture_sizes=[4], block_size=block_size).generate(requests)) == wanted


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_nothing_ever_writes_to_the_null_block(make_decoder, requests, shadow, lowering):
    decoder = make_decoder(shadow, decode=lowering, capture_sizes=[4])
    decoder.generate(requests)
    for cache in (*decoder.target.caches, *decoder.drafter.caches):
        assert not cache.key[0].any()
        assert not cache.value[0].any()
        assert cache.key[1:].any()


def test_batches_of_every_size_up_to_nine(make_decoder, shadow):
    """Nine requests that finish one after the other: the batch shrinks through every size."""
    many = [Request(prompt_token_ids=prompt(2 + i, seed=i), max_tokens=3 + 2 * i) for i in range(9)]
    decoder = make_decoder(shadow, max_num_requests=9, capture_sizes=[2, 3, 9])
    assert tokens(decoder.generate(many)) == [tokens(decoder.generate([one]))[0] for one in many]

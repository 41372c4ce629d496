"""Requests that join while others run, and requests that are cancelled: the others' tokens do not change."""

from __future__ import annotations

import pytest
from random_prompts import prompt

from specgraph.engine import Request
from specgraph.errors import CapacityError, ConfigError


def finish(decoder, tokens, reasons):
    while decoder.num_unfinished:
        take(decoder.step(), tokens, reasons)


def take(chunks, tokens, reasons):
    for chunk in chunks:
        assert chunk.request not in reasons, "nothing comes after the last chunk"
        tokens.setdefault(chunk.request, []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            reasons[chunk.request] = chunk.finish_reason


SHAPES = ((4, 20), (9, 3), (1, 17), (16, 1), (15, 12), (30, 9), (8, 14))


@pytest.fixture
def alone(make_decoder, shadow):
    """By shape, what a request gives with nobody else there."""
    decoder = make_decoder(shadow, capture_sizes=[4])
    return {shape: decoder.generate([request(shape)])[0].token_ids for shape in SHAPES}


def request(shape):
    return Request(prompt_token_ids=prompt(shape[0], seed=shape[0]), max_tokens=shape[1])


def test_a_cancelled_request_gives_its_blocks_to_one_that_waits(make_decoder, shadow):
    decoder = make_decoder(shadow, num_blocks=12)
    first, second = decoder.add(request((20, 9))), decoder.add(request((20, 9)))
    assert [chunk.request for chunk in decoder.step()] == [first]
    assert decoder.cancel(first)
    chunks = decoder.step()
    assert (chunks[0].request, chunks[0].token_ids, chunks[0].finish_reason) == (first, [], "cancelled")
    assert [chunk.request for chunk in chunks[1:]] == [second]


def test_what_can_never_run_is_refused_at_once(make_decoder, shadow):
    decoder = make_decoder(shadow)
    with pytest.raises(CapacityError, match="may have 63"):
        decoder.add(request((64, 1)))
    with pytest.raises(ConfigError, match=r"config\.sampled"):
        decoder.add(Request(prompt_token_ids=[1], max_tokens=1, temperature=1.0))
    assert decoder.num_unfinished == 0


def test_a_stream_needs_the_decoder_for_itself(make_decoder, shadow, requests):
    decoder = make_decoder(shadow)
    request_id = decoder.add(requests[0])
    with pytest.raises(CapacityError, match="unfinished requests"):
        next(decoder.stream(requests))
    decoder.cancel(request_id)
    decoder.step()
    assert len(decoder.generate(requests)) == len(requests)


def test_an_open_stream_takes_no_other_request(make_decoder, shadow, alone):
    decoder = make_decoder(shadow, capture_sizes=[4])
    stream = decoder.stream([request(SHAPES[0])])
    tokens = list(next(stream).token_ids)
    with pytest.raises(ConfigError, match="while a stream is open"):
        decoder.add(request(SHAPES[1]))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone[SHAPES[0]]
    tokens, reasons = {}, {}
    added = decoder.add(request(SHAPES[1]))
    finish(decoder, tokens, reasons)
    assert tokens == {added: alone[SHAPES[1]]}


def test_generate_says_which_request_was_cancelled(make_decoder, shadow, alone, monkeypatch):
    """By another thread, say, in the middle of it; requests before and behind it are finished or refused."""
    decoder, steps = make_decoder(shadow, capture_sizes=[4]), []
    step = decoder.step

    def cancelling():
        steps.append(len(steps))
        if len(steps) == 3:
            assert decoder.cancel(1)
        return step()

    monkeypatch.setattr(decoder, "step", cancelling)
    too_long = Request(prompt_token_ids=prompt(10_000, seed=9), max_tokens=1)
    kept, cancelled, refused = decoder.generate([request((4, 20)), request((1, 17)), too_long])
    assert (kept.finish_reason, kept.token_ids) == ("length", alone[4, 20])
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 17
    assert cancelled.token_ids == alone[1, 17][: len(cancelled.token_ids)]
    assert (refused.finish_reason, refused.token_ids) == ("refused", [])
    assert "10000" in refused.message

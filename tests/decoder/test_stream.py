"""Requests that join while others run and leave early, one by one or as a stream: what is handed out adds up."""

from __future__ import annotations

import itertools

import pytest
import torch
from random_prompts import prompt
from specgraph_run.decoder import Generation, Request, SpeculativeDecoder
from specgraph_run.decoder.request import Running

from specgraph.config import DraftConfig
from specgraph.cpu import CpuPlatform
from specgraph.errors import CapacityError, ConfigError


def test_chunks_add_up_to_generate(make_decoder, requests, shadow):
    wanted = make_decoder(shadow).generate(requests)
    decoder = make_decoder(shadow)
    results = [Generation() for _ in requests]
    verified, accepted = 0, 0
    for chunk in decoder.stream(requests):
        result = results[chunk.request]
        assert result.finish_reason is None  # nothing comes after the last chunk
        assert 1 <= len(chunk.token_ids) <= 4
        assert 0 <= chunk.num_accepted <= 3
        if not result.token_ids:
            assert (len(chunk.token_ids), chunk.num_accepted) == (1, 0)  # from the prefill
        else:
            verified += 1
            accepted += chunk.num_accepted
            if chunk.finish_reason is None:
                assert chunk.num_accepted == len(chunk.token_ids) - 1
        result.token_ids += chunk.token_ids
        result.finish_reason = chunk.finish_reason
    assert results == wanted
    assert decoder.metrics.num_drafts == verified
    assert accepted == sum(decoder.metrics.accepted) > 0


def test_accepted_tokens_are_the_drafts(make_decoder, shadow):
    decoder = make_decoder(shadow)
    before = None
    for chunk in decoder.stream([Request(prompt_token_ids=prompt(2), max_tokens=30)]):
        if before is not None:
            kept = chunk.token_ids[: chunk.num_accepted]
            assert kept == before[: len(kept)]
        before = decoder.drafter.buffers.draft_token_ids[0].tolist()
    assert decoder.metrics.accepted[2] > 0


def test_an_abandoned_stream_gives_its_blocks_back_wherever_it_stops(make_decoder, requests, shadow):
    decoder = make_decoder(shadow, num_blocks=40)
    wanted = decoder.generate(requests)
    total = sum(1 for _ in decoder.stream(requests))
    for stop in (0, 1, 3, 4, 5, total // 2, total - 1):  # before, within and after the round in which four join
        stream = decoder.stream(requests)
        list(itertools.islice(stream, stop))
        stream.close()
        assert decoder.allocator.num_free == 39
    assert decoder.generate(requests) == wanted


def test_a_stream_that_fails_midway_gives_its_blocks_back(make_decoder, requests, shadow, monkeypatch):
    decoder = make_decoder(shadow, num_blocks=40)
    wanted = decoder.generate(requests)
    for owner, name, at in (
        (decoder.target, "prefill", 3),
        (decoder.target, "verify", 4),
        (decoder.drafter, "propose", 2),
    ):
        calls, real = itertools.count(), getattr(owner, name)

        def failing(*args, calls=calls, at=at, real=real, **kwargs):
            if next(calls) == at:
                raise RuntimeError("the device is gone")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(RuntimeError, match="the device is gone"):
                decoder.generate(requests)
        assert decoder.allocator.num_free == 39
    assert decoder.generate(requests) == wanted


class Slip(Exception):
    pass


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_that_fails_to_join_ends_alone(make_decoder, shadow, alone, monkeypatch, ahead):
    """It fails in every place of the queue, in the middle of its prompt. The others get all their tokens, those of the
    round that was launched before it too."""
    decoder, bad = make_decoder(shadow, rounds_ahead=ahead, prefill_sizes=[8]), request((20, 7))
    real, good = decoder.drafter.prefill, (SHAPES[0], SHAPES[4], SHAPES[3])

    def prefill(ids, positions, *args, **kwargs):
        if [*ids] == [*bad.prompt_token_ids] and positions.start:
            raise Slip
        return real(ids, positions, *args, **kwargs)

    monkeypatch.setattr(decoder.drafter, "prefill", prefill)
    for place in (0, 2, 3):
        asked = [*map(request, good)]
        asked.insert(place, bad)
        tokens, reasons, slips = {}, {}, 0
        ids = [decoder.add(asked[0])]
        while decoder.num_unfinished:
            try:
                take(decoder.step(), tokens, reasons)
            except Slip:
                slips += 1
            ids += [decoder.add(each) for each in asked[len(ids) :]]  # these join while the first one runs
        lost = ids.pop(place)
        assert (slips, tokens.pop(lost), reasons.pop(lost)) == (1, [], "failed")
        assert [tokens[each] for each in ids] == [alone[shape] for shape in good]
        assert decoder.allocator.num_free == decoder.allocator.capacity


@pytest.mark.parametrize(("owner", "name"), [("target", "verify"), ("drafter", "propose"), ("rounds", "_read")])
def test_a_round_that_fails_ends_its_requests_with_a_chunk_each(make_decoder, shadow, alone, monkeypatch, owner, name):
    decoder = make_decoder(shadow, rounds_ahead=1)
    tokens, reasons = {}, {}
    *running, waiting = [decoder.add(request(SHAPES[0])) for _ in range(5)]
    for _ in range(2):
        take(decoder.step(), tokens, reasons)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(decoder, owner), name, lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decoder.step()
    finish(decoder, tokens, reasons)
    assert reasons == dict.fromkeys(running, "failed") | {waiting: "length"}
    assert tokens.pop(waiting) == alone[SHAPES[0]]
    assert all(0 < len(got) < 20 and got == alone[SHAPES[0]][: len(got)] for got in tokens.values())
    assert decoder.allocator.num_free == decoder.allocator.capacity


def test_requests_are_queued_all_or_none(make_decoder, shadow, alone, monkeypatch):
    decoder, made = make_decoder(shadow), itertools.count()

    def running(*args):
        if next(made) == 1:
            raise Slip
        return Running(*args)

    with monkeypatch.context() as patch:
        patch.setattr("specgraph_run.decoder.decoder.Running", running)
        with pytest.raises(Slip):
            decoder.generate([request(SHAPES[0]), request(SHAPES[1])])
    assert decoder.num_unfinished == 0
    assert decoder.generate([request(SHAPES[0])])[0].token_ids == alone[SHAPES[0]]


def test_two_open_streams_of_one_decoder_are_refused(make_decoder, requests, shadow):
    """They would overwrite each other's drafts."""
    decoder = make_decoder(shadow)
    first = decoder.stream(requests)
    next(first)
    with pytest.raises(CapacityError, match="still open"):
        next(decoder.stream(requests))
    rest = sum(len(chunk.token_ids) for chunk in first)
    assert rest == sum(request.max_tokens for request in requests) - 1
    assert sum(len(chunk.token_ids) for chunk in decoder.stream(requests)) == rest + 1


@pytest.mark.parametrize("outer", ["generate", "stream"])
def test_a_stream_that_another_thread_begins_meanwhile_is_refused(make_decoder, requests, shadow, monkeypatch, outer):
    """The other thread is simulated: its call comes where the first one has not queued its requests yet."""
    decoder = make_decoder(shadow)
    alone = [each.token_ids for each in decoder.generate(requests)]
    check, refused = decoder._check, []

    def interrupted(request):
        if not refused:
            for use in (decoder.generate, lambda requests: next(decoder.stream(requests))):
                with pytest.raises(ConfigError, match="another call runs") as error:
                    use(requests)
                refused.append(error)
        check(request)

    monkeypatch.setattr(decoder, "_check", interrupted)
    given = [[] for _ in requests]
    if outer == "generate":
        given = [each.token_ids for each in decoder.generate(requests)]
    else:
        for chunk in decoder.stream(requests):
            given[chunk.request] += chunk.token_ids
    assert given == alone
    assert len(refused) == 2


def test_nothing_to_generate(make_decoder, shadow):
    assert make_decoder(shadow).generate([]) == []


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


@pytest.fixture(scope="module")
def alone(target):
    """The target's own tokens for a request of each shape."""
    config = DraftConfig(num_speculative_tokens=3, max_num_requests=1, max_model_len=64, block_size=4, decode="eager")
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, None, CpuPlatform(), config, query_len=4)
        decoder.capture()
        return {shape: decoder.generate([request(shape)])[0].token_ids for shape in SHAPES}


def request(shape):
    return Request(prompt_token_ids=prompt(shape[0], seed=shape[0]), max_tokens=shape[1])


@pytest.mark.hazard("cancel-ends-another")
def test_a_cancelled_request_gives_its_blocks_to_one_that_waits(make_decoder, shadow):
    decoder = make_decoder(shadow, num_blocks=12)
    first, second = decoder.add(request((20, 9))), decoder.add(request((20, 9)))
    assert [chunk.request for chunk in decoder.step()] == [first]
    assert decoder.cancel(first)
    chunks = decoder.step()
    assert (chunks[0].request, chunks[0].token_ids, chunks[0].finish_reason) == (first, [], "cancelled")
    assert [chunk.request for chunk in chunks[1:]] == [second]


def test_an_open_stream_takes_no_other_request_and_gives_nobody_its_chunks(make_decoder, shadow, alone):
    decoder = make_decoder(shadow)
    stream = decoder.stream([request(SHAPES[0])])
    tokens = list(next(stream).token_ids)
    for use in (decoder.step, lambda: decoder.add(request(SHAPES[1]))):
        with pytest.raises(ConfigError, match="while a stream is open"):
            use()
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone[SHAPES[0]]
    tokens, reasons = {}, {}
    added = decoder.add(request(SHAPES[1]))
    finish(decoder, tokens, reasons)
    assert tokens == {added: alone[SHAPES[1]]}


def test_generate_says_which_request_was_cancelled(make_decoder, shadow, alone, monkeypatch):
    """A request is cancelled in the middle of it; those before and behind it are finished or refused."""
    decoder, steps = make_decoder(shadow), []
    step = decoder._step

    def cancelling():
        steps.append(len(steps))
        if len(steps) == 3:
            assert decoder.cancel(1)
        return step()

    monkeypatch.setattr(decoder, "_step", cancelling)
    too_long = Request(prompt_token_ids=prompt(10_000, seed=9), max_tokens=1)
    kept, cancelled, refused = decoder.generate([request((4, 20)), request((1, 17)), too_long])
    assert (kept.finish_reason, kept.token_ids) == ("length", alone[4, 20])
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 17
    assert cancelled.token_ids == alone[1, 17][: len(cancelled.token_ids)]
    assert (refused.finish_reason, refused.token_ids) == ("refused", [])
    assert "10000" in refused.message

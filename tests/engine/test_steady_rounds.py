"""Rounds that are kept as arrays, against `Running.add` for each request of each round."""

import struct
from array import array
from itertools import chain

import pytest
from draft.pairs import VOCAB, make_head, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import prompt

from specgraph import EngineConfig, Request, SpeculativeDecoder
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import steady_rounds
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Running
from specgraph.engine.round_outputs import ReadRound
from specgraph.engine.steady_rounds import RoundChunks, SteadyRounds
from specgraph.errors import SpecgraphError


def _state(index, limit, stops):
    prompt = [7] * (index % 3 + 1)
    request = Request(prompt_token_ids=prompt, max_tokens=limit, stop_token_ids=stops)
    return Running(index, request, [], array("q", prompt), len(prompt) + limit)


def _read(number, rows, query_len, token_ids, counts):
    return ReadRound(number, rows, query_len, token_ids, struct.pack(f"{len(counts)}i", *counts), is_last=True)


@given(data=st.data())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_kept_rounds_give_each_request_the_tokens_and_chunks_that_it_would_get_alone(data):
    """Rows without a request, stop tokens, limits, and rounds of other K; a request that ends leaves its row empty."""
    limits = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    stops = [data.draw(st.sampled_from([(), (3,), (5, 900)])) for _ in limits]
    kept = [_state(i, limit, stop) for i, (limit, stop) in enumerate(zip(limits, stops, strict=True))]
    alone = [_state(i, limit, stop) for i, (limit, stop) in enumerate(zip(limits, stops, strict=True))]
    rows: list[Running | None] = [*kept]
    if data.draw(st.booleans()):
        rows.insert(data.draw(st.integers(0, len(rows))), None)
    steady, query_len, most_token = SteadyRounds(AcceptanceMetrics(3)), 3, data.draw(st.sampled_from([6, 1000]))
    for number in range(data.draw(st.integers(1, 60))):
        if not any(rows):
            break
        query_len = data.draw(st.sampled_from([query_len] * 6 + [1, 4]))
        counts = [data.draw(st.integers(1, query_len)) if row else data.draw(st.integers(0, query_len)) for row in rows]
        tokens = [
            [data.draw(st.integers(0, most_token)) for _ in range(count)] + [-1] * (query_len - count)
            for count in counts
        ]
        packed = struct.pack(f"{len(rows) * query_len}q", *chain(*tokens))
        read = _read(number + 1, rows, query_len, packed, counts)
        live = [row for row, state in enumerate(rows) if state]
        sampled = {row: tokens[row][: counts[row]] for row in live}
        expected = [alone[rows[row].index].add(sampled[row]) for row in live]
        ended = [chunk for chunk in expected if chunk.finish_reason]
        taken = steady.take(read)
        if taken is None:
            steady.end()
            assert [rows[row].add(sampled[row]) for row in live] == expected
        else:
            assert not ended
            assert [*taken] == [counts[row] for row in live]
            chunks = RoundChunks(read, len(taken))
            assert len(chunks) == len(expected)
            assert chunks == expected
            assert repr(chunks) == repr(expected)
        if data.draw(st.integers(0, 9)) == 0:
            steady.fold()
        if steady.left:
            assert steady.left <= min(state.limit - len(state.token_ids) for state in map(_by(alone), rows) if state)
        if ended:
            rows = [None if any(state and state.index == chunk.request for chunk in ended) else state for state in rows]
    steady.fold()
    assert [state.token_ids for state in kept] == [state.token_ids for state in alone]


def _by(states):
    return lambda state: state and states[state.index]


def test_a_round_is_kept_unless_somebody_may_have_ended():
    """Long requests without stop tokens: all rounds are kept, no more than MOST_KEPT of all requests at one time."""
    metrics, states = AcceptanceMetrics(2), [_state(i, 2000, ()) for i in range(3)]
    steady = SteadyRounds(metrics)
    for number in range(500):
        read = _read(number + 1, states, 3, struct.pack("9q", 0, -1, -1, 3, 4, -1, 6, 7, 8), [1, 2, 3])
        assert [*steady.take(read)] == [1, 2, 3]
        behind = number + 1 - (2000 - states[0].num_left)
        assert behind == number + 1 - metrics.rounds <= steady_rounds.MOST_KEPT / 3
    steady.fold()
    assert [state.num_output for state in states] == [500, 1000, 1500]
    assert (metrics.rounds, metrics.num_drafts, metrics.accepted) == (500, 1500, [1000, 500])
    assert states[1].token_ids[2:6].tolist() == [3, 4, 3, 4]


@pytest.mark.parametrize("count", [0, 4, -1, 257, 1 << 16 | 1])
def test_a_round_with_an_impossible_count_is_not_kept(count):
    states = [_state(i, 1000, ()) for i in range(2)]
    assert SteadyRounds(AcceptanceMetrics(2)).take(_read(1, states, 3, bytes(48), [1, count])) is None


def test_tokens_behind_those_that_were_sampled_are_an_error_and_go_to_nobody():
    states = [_state(i, 1000, ()) for i in range(2)]
    steady = SteadyRounds(AcceptanceMetrics(2))
    assert steady.take(_read(1, states, 3, struct.pack("6q", 3, 4, -1, 5, -1, -1), [1, 1])) is not None
    with pytest.raises(SpecgraphError, match="1 rounds of 2 requests have 3 tokens, and by their counts 2: something"):
        steady.fold()
    assert [state.num_output for state in states] == [0, 0]


def test_generate_touches_no_request_in_rounds_in_which_nobody_joins_or_ends(monkeypatch):
    """`stream` makes a chunk per request and round, and `generate` gives the same tokens."""
    target = make_target()
    config = EngineConfig(
        num_speculative_tokens=3, max_num_requests=2, max_model_len=72, block_size=4, capture_sizes=[2],
        prefill_sizes=[8], decode="round",
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, make_head("eagle", target), CpuPlatform(), config)
    decoder.capture()
    requests = [
        Request(prompt_token_ids=[token % VOCAB for token in prompt(8, seed=seed)], max_tokens=60) for seed in (1, 2)
    ]
    streamed, chunks = {0: [], 1: []}, 0
    for chunk in decoder.stream(requests):
        streamed[chunk.request] += chunk.token_ids
        chunks += 1
    calls, add = [], Running.add
    monkeypatch.setattr(Running, "add", lambda state, tokens: (calls.append(state.index), add(state, tokens))[1])
    results = decoder.generate(requests)
    assert [result.token_ids for result in results] == [streamed[0], streamed[1]]
    assert [(len(result.token_ids), result.finish_reason) for result in results] == [(60, "length")] * 2
    # The token of the prompt, and rounds with at most 4 tokens to give, of this request or of the other.
    assert len(calls) <= 2 * (1 + 4 + 4) < 2 * 60 / 4 < chunks
    decoder.close()


def test_chunks_may_be_read_after_their_requests_have_ended():
    """The same arrivals twice, one request cancelled: chunks read at once, and chunks read when all is over."""
    target = make_target()
    config = EngineConfig(
        num_speculative_tokens=3, max_num_requests=3, max_model_len=72, block_size=4, capture_sizes=[1, 3],
        prefill_sizes=[8], decode="round",
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, make_head("eagle", target), CpuPlatform(), config)
    decoder.capture()

    def steps():
        ids = [
            decoder.add(Request(prompt_token_ids=[token % VOCAB for token in prompt(8, seed=i)], max_tokens=length))
            for i, length in enumerate([50, 21, 60, 33])
        ]
        for number in range(1000):
            if number == 7:
                assert decoder.cancel(ids[2])
            yield ids[0], decoder.step()
            if not decoder.num_unfinished:
                return

    def read(first, chunks):
        return [(chunk.request - first, chunk.token_ids, chunk.finish_reason) for chunk in chunks]

    at_once = [read(first, chunks) for first, chunks in steps()]
    kept = [*steps()]
    decoder.close()
    assert sum(isinstance(chunks, RoundChunks) for _, chunks in kept) > 5
    assert [read(first, chunks) for first, chunks in kept] == at_once

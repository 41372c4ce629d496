"""The end of a generation, what is refused, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_prompts import prompt
from specgraph_run.decoder import Request
from specgraph_run.decoder.agreement import check_sharing

from specgraph.config import DraftConfig
from specgraph.errors import ConfigError, UnsupportedError

MAX_MODEL_LEN = 64


def one(length: int, max_tokens: int, **kwargs) -> Request:
    return Request(prompt_token_ids=prompt(length, seed=length), max_tokens=max_tokens, **kwargs)


@pytest.fixture
def unlimited(make_decoder):
    """A request's greedy tokens by the target alone, with room for twice as many."""
    decoder = make_decoder(None, query_len=4, max_model_len=128)

    def run(request: Request, count: int) -> list[int]:
        longer = Request(prompt_token_ids=request.prompt_token_ids, max_tokens=count)
        return decoder.generate([longer])[0].token_ids

    return run


@pytest.mark.parametrize(("steps", "lowering", "attention"), [(3, "merged", "device"), (7, "merged", "host")])
def test_max_model_len_is_reached_exactly_and_never_passed(make_decoder, shadow, unlimited, steps, lowering, attention):
    """Requests begin at every distance from the end; rows would go on past it. No check of values objects."""
    requests = [one(MAX_MODEL_LEN - left, 100) for left in range(1, 2 * steps + 3)]
    decoder = make_decoder(
        shadow,
        num_speculative_tokens=steps,
        decode=lowering,
        attention=attention,
        max_num_requests=3,
        capture_sizes=[3],
        debug=True,
    )
    for request, result in zip(requests, decoder.generate(requests), strict=True):
        left = MAX_MODEL_LEN - len(request.prompt_token_ids)
        assert result.token_ids == unlimited(request, left)
        assert result.finish_reason == "length"


def test_a_prompt_of_max_model_len_is_refused_while_others_go_on(make_decoder, shadow):
    decoder = make_decoder(shadow)
    long, longer, fine = one(MAX_MODEL_LEN, 1), one(MAX_MODEL_LEN + 9, 1), one(MAX_MODEL_LEN - 1, 5)
    results = decoder.generate([long, fine, longer])
    assert [r.finish_reason for r in results] == ["refused", "length", "refused"]
    assert [len(r.token_ids) for r in results] == [0, 1, 0]
    assert "64 tokens" in results[0].message
    assert "may have 63" in results[0].message
    assert "73 tokens" in results[2].message


def test_a_stream_that_is_closed_at_a_refused_request_leaves_none(make_decoder, shadow):
    decoder = make_decoder(shadow)
    stream = decoder.stream([one(MAX_MODEL_LEN, 1), one(4, 5)])
    assert next(stream).finish_reason == "refused"
    stream.close()
    assert decoder.num_unfinished == 0
    assert [len(result.token_ids) for result in decoder.generate([one(4, 5)])] == [5]


def test_a_stop_token_that_is_the_last_allowed_one_is_a_stop(make_decoder, unlimited, shadow):
    whole = unlimited(one(4, 20), 20)
    at = next(i for i in range(5, 20) if whole.index(whole[i]) == i)
    result = make_decoder(shadow).generate([one(4, at + 1, stop_token_ids=[whole[at]])])[0]
    assert (len(result.token_ids), result.finish_reason) == (at + 1, "stop")


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (one(4, 5, temperature=0.7), "load it with sampled=True"),
        (Request(prompt_token_ids=[1, 96, 2], max_tokens=3), "96 is not in the target's vocabulary of 96"),
        (Request(prompt_token_ids=[1, -1, 2], max_tokens=3), "-1 is not in the target's vocabulary"),
    ],
)
def test_a_wrong_request_is_an_error_before_anything_ran(make_decoder, shadow, request_, says):
    decoder = make_decoder(shadow)
    with pytest.raises(ConfigError, match=says):
        decoder.generate([one(4, 5), request_])
    assert decoder.metrics.rounds == 0
    assert decoder.allocator.num_free == decoder.allocator.capacity
    assert decoder.generate([one(4, 5)])[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_model_len": 129}, "max_model_len 129 exceeds the target's 128"),
        ({"num_blocks": 0}, "num_blocks must be at least 2"),
        ({"num_blocks": -4}, "num_blocks must be at least 2"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"query_len": 2}, "K \\+ 1 = 4"),
        ({"query_len": 0}, "query_len must be at least 1"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"max_num_requests": 0}, "max_num_requests"),
        ({"block_size": 0}, "block_size"),
        ({"decode": "merged", "capture_sizes": [2]}, "fallback"),
        ({"decode": "fastest"}, "decode must be one of .*, got 'fastest'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(make_decoder, shadow, changes, says):
    with pytest.raises(ConfigError, match=says):
        make_decoder(shadow, **changes)


def test_batches_beyond_the_captured_sizes_run_eager_if_asked(make_decoder, requests, shadow, target_alone):
    decoder = make_decoder(shadow, decode="merged", capture_sizes=[2], fallback="eager")
    assert [r.token_ids for r in decoder.generate(requests)] == target_alone(requests)
    assert 0 < decoder.drafter.launches["propose"] < decoder.drafter.num_proposes
    decoder = make_decoder(shadow, decode="eager", prefill="full", capture_sizes=[2])  # only prompts have graphs
    assert [r.token_ids for r in decoder.generate(requests)] == target_alone(requests)


def test_data_parallel_ranks_draft_one_k():
    config = DraftConfig(
        num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, k_candidates=(1, 2)
    )
    with pytest.raises(UnsupportedError, match="with data parallel ranks"):
        check_sharing(config)
    check_sharing(replace(config, k_candidates=None))

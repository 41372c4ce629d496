"""Requests that are wrong in themselves are refused when they are made."""

from __future__ import annotations

import math

import pytest
from specgraph_run.decoder import Request

from specgraph.errors import ConfigError


@pytest.mark.hazard("wrong-request-taken")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_token_ids": []}, "no tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -3}, "got -3"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-30}, "at least 1e-05"),
        ({"seed": 2**63}, "seed must be at most 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "seed must be at least -9223372036854775808"),
        ({"stop_token_ids": [3, 2**63]}, r"stop_token_ids\[1\] must be at most 9223372036854775807"),
        ({"stop_token_ids": [-(2**63) - 1]}, "stop_token_ids"),
        ({"stop_token_ids": [2.0]}, "got 2.0"),
        ({"stop_token_ids": [True]}, "got True"),
        ({"top_p": 0.0}, "top_p must be at least 1e-06, got 0.0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] must be at most 1000"),
    ],
)
def test_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        Request(**({"prompt_token_ids": [1], "max_tokens": 4} | change))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1e-5},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"stop_token_ids": [2**63 - 1]},
    ],
)
def test_the_limits_themselves_are_fine(change):
    Request(**({"prompt_token_ids": [1], "max_tokens": 4} | change))


def test_a_change_of_the_caller_s_list_changes_no_request():
    ids = [1, 2]
    made = Request(prompt_token_ids=ids, max_tokens=1)
    ids.append(-1)
    assert list(made.prompt_token_ids) == [1, 2]

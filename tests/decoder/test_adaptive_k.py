"""K that follows acceptance: the K it settles on, what it costs to follow, and that the tokens stay the target's."""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_run.decoder.adaptive_k import AcceptanceRates, AdaptiveK, best_k, expected_tokens
from specgraph_run.options import GeneratorOptions
from specgraph_run.text.load import draft_config

from specgraph.errors import ConfigError

CANDIDATES = (1, 2, 3, 5)
TIMES = {1: {1: 500.0, 2: 590.0, 3: 680.0, 5: 860.0}, 2: {1: 510.0, 2: 610.0, 3: 720.0, 5: 950.0},
         4: {1: 600.0, 2: 800.0, 3: 1000.0, 5: 1400.0}}  # fmt: skip
AUTO = {"k_candidates": CANDIDATES, "num_speculative_tokens": 5, "round_times": TIMES, "capture_sizes": [1, 2, 4]}


def per_second(rate: float, k: int, time: float) -> float:
    """Tokens of a request per microsecond if each draft token is accepted with this chance, by the geometric series."""
    return sum(rate**i for i in range(k + 1)) / time


def accepted(chances: list[float], k: int, random: Random) -> int:
    """Draft tokens accepted of K: up to the first that is not."""
    return next((i for i in range(k) if random.random() >= chances[i]), k)


def simulate(policy: AdaptiveK, chances: list[float], size: int, rounds: int, seed: int) -> float:
    """Tokens of a request per microsecond of the table, over rounds that accept by chance."""
    random, tokens, time = Random(seed), 0, 0.0
    for _ in range(rounds):
        k = policy.choose(size)
        counts = [accepted(chances, k, random) for _ in range(size)]
        policy.acceptance.observe(k, counts)
        tokens, time = tokens + sum(counts) + size, time + policy.times[size][k]
    return tokens / size / time


@pytest.mark.parametrize(("rate", "size"), list(product((0.3, 0.6, 0.9), (1, 2, 4))))
def test_within_3_percent_of_the_best_fixed_k(rate, size):
    """Time is that of the table; sampling error of 12,000 drafts is below 1 %."""
    best = max(per_second(rate, k, time) for k, time in TIMES[size].items())
    policy = AdaptiveK(TIMES, AcceptanceRates(5))
    assert simulate(policy, [rate] * 5, size, 12000 // size, seed=size) >= 0.97 * best


def test_it_follows_a_change_in_both_directions():
    policy = AdaptiveK(TIMES, AcceptanceRates(5))
    for rate, k in ((0.9, 5), (0.2, 1), (0.9, 5)):
        simulate(policy, [rate] * 5, 2, 1000, seed=1)
        assert best_k(partial(expected_tokens, [rate] * 5), TIMES[2]) == k == policy.choose(2)


def test_places_may_differ():
    """Chances that fall with the place: the sum of products decides, not their mean."""
    chances = [0.95, 0.9, 0.2, 0.1, 0.1]
    policy = AdaptiveK(TIMES, AcceptanceRates(5))
    best = max((1 + sum_of_products(chances, k)) / time for k, time in TIMES[4].items())
    assert simulate(policy, chances, 4, 4000, seed=3) >= 0.97 * best
    assert policy.acceptance.rates[:2] == pytest.approx(chances[:2], abs=0.1)


def sum_of_products(chances: list[float], k: int) -> float:
    total, product_so_far = 0.0, 1.0
    for chance in chances[:k]:
        product_so_far *= chance
        total += product_so_far
    return total


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 5), max_size=6)), max_size=12))
def test_rates_are_those_of_counting_every_draft_with_its_weight(rounds):
    rates = AcceptanceRates(5)
    weights: list[tuple[float, int, int]] = []
    for k, counts in rounds:
        counts = [min(count, k) for count in counts]
        kept = 0.5 ** (len(counts) / 256)
        weights = [(weight * kept, of, count) for weight, of, count in weights] + [(1.0, k, c) for c in counts]
        rates.observe(k, counts)
    before = 0.7
    for place, rate in enumerate(rates.rates):
        reached = sum(w for w, k, count in weights if k > place and count >= place)
        kept = sum(w for w, k, count in weights if k > place and count > place)
        before = (kept + 4 * before) / (reached + 4)
        assert rate == pytest.approx(before)
    assert expected_tokens(rates.rates, 5) == pytest.approx(1 + sum_of_products(rates.rates, 5))


def test_a_batch_beyond_every_captured_size_runs_eagerly_with_the_k_of_the_largest(make_decoder, requests, shadow):
    settings = {"k_candidates": (1, 3), "round_times": {1: {1: 0.1, 3: 1.0}, 2: {1: 1.0, 3: 0.1}}}
    settings |= {"capture_sizes": [1, 2], "decode": "merged", "fallback": "eager"}
    decoder = make_decoder(shadow, **settings)
    wanted = make_decoder(None).generate([requests[0]] * 4)
    assert [r.token_ids for r in decoder.generate([requests[0]] * 4)] == [r.token_ids for r in wanted]
    assert set(decoder.metrics.drafts_by_k) == {3}


def test_k_by_acceptance_is_possible_with_ranks_that_split_the_models():
    """They choose by the times of the first one; `tests/parallel/test_tensor_parallel.py` runs them."""
    config = draft_config(GeneratorOptions(num_speculative_tokens="auto", tensor_parallel=2), max_model_len=64)
    assert (config.k_candidates, config.num_speculative_tokens) == ((1, 2, 3, 5), 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_candidates": (3, 2)}, "ascending"),
        ({"k_candidates": (0, 5)}, "at least 1"),
        ({"k_candidates": (1, 2)}, "end at 2.*is 5"),
        ({"k_candidates": None}, "K is fixed"),
        ({"draft_schedule": {4: 5}}, "leave out draft_schedule"),
        ({"round_times": {1: TIMES[1]}}, "no time for 2 requests and K 1"),
        ({"round_times": {**TIMES, 4: {**TIMES[4], 3: 0.0}}}, r"round_times\[4\]\[3\] must be at least 1e-09"),
    ],
)
def test_refusals(make_decoder, shadow, changes, words):
    with pytest.raises(ConfigError, match=words):
        make_decoder(shadow, **AUTO | changes)


def test_a_propose_of_a_k_that_was_not_captured(make_decoder, shadow):
    drafter = make_decoder(shadow, **AUTO).drafter
    with pytest.raises(ConfigError, match=r"K 4 is none of those .* 1 requests \([\d, ]+\): .* k_candidates"):
        drafter.propose(drafter.inputs(1), num_speculative_tokens=4)

"""Trees for small batches and chains for large ones, in one decoder: requests cross the border in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import prompt

from specgraph.draft import DraftTree
from specgraph.engine import Request
from specgraph.errors import ConfigError

TREE = DraftTree(num_steps=3, top_k=3, num_draft_tokens=9)
SCHEDULES = [{1: "tree", 4: 2}, {2: "tree", 4: 5}, {1: 4, 4: "tree"}, {1: "tree", 2: 3, 4: 0}]


def mixed(schedule: dict) -> dict:
    chains = [k for k in schedule.values() if k != "tree"]
    return {"draft_schedule": schedule, "tree": TREE, "num_speculative_tokens": max([TREE.num_steps, *chains])}


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture
def by_target(make_decoder, requests):
    return tokens(make_decoder(None).generate(requests))


@pytest.mark.parametrize(
    ("lowering", "schedule"),
    [("eager", SCHEDULES[0]), ("step", SCHEDULES[1]), *(("merged", each) for each in SCHEDULES)],
    ids=str,
)
def test_equal_to_the_target_alone(make_decoder, requests, by_target, shadow, schedule, lowering):
    decoder = make_decoder(shadow, decode=lowering, check_inputs=True, **mixed(schedule))
    assert tokens(decoder.generate(requests)) == by_target
    if lowering == "merged":
        assert decoder.drafter.launches["propose"] == decoder.drafter.num_proposes
    assert decoder.metrics.accepted[1] > 0


@pytest.fixture
def both(make_decoder, shadow):
    """The target alone, and a mixed schedule, with one graph per propose."""
    return make_decoder(None), make_decoder(shadow, decode="merged", **mixed({2: "tree", 4: 2}))


def test_random_arrivals_and_cancellations(both):
    alone, decoder = both

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 6), st.integers(0, 25)),
            min_size=1,
            max_size=8,
        )
    )
    def run(asked):
        """Each request: prompt length, tokens, rounds before it arrives, rounds before it is cancelled (20+: never)."""
        requests = [Request(prompt_token_ids=prompt(n, seed=n), max_tokens=m) for n, m, _, _ in asked]
        wanted = tokens(alone.generate(requests))
        got: dict[int, list[int]] = {}
        ids: dict[int, int] = {}
        reasons: dict[int, str] = {}
        for step in range(200):
            for i, (_, _, arrival, _) in enumerate(asked):
                if arrival == step:
                    ids[decoder.add(requests[i])] = i
            for name, i in ids.items():
                if step - asked[i][2] == asked[i][3] < 20:
                    decoder.cancel(name)
            for chunk in decoder.step():
                got.setdefault(ids[chunk.request], []).extend(chunk.token_ids)
                if chunk.finish_reason:
                    reasons[ids[chunk.request]] = chunk.finish_reason
            if len(reasons) == len(asked):
                break
        assert decoder.num_unfinished == 0
        assert decoder.allocator.num_free == decoder.allocator.capacity
        for i, reason in reasons.items():
            mine = got.get(i, [])
            assert mine == (wanted[i][: len(mine)] if reason == "cancelled" else wanted[i])

    run()


def test_drafts_are_those_of_a_decoder_that_drafts_one_kind(make_decoder, shadow):
    """A request that was drafted for in trees has the drafter KV that chains would have left, and the other way round:
    the drafts that follow are accepted alike."""
    long = Request(prompt_token_ids=prompt(9, seed=9), max_tokens=40)
    short = [Request(prompt_token_ids=prompt(5 + i, seed=i), max_tokens=6) for i in range(3)]

    def caches(decoder):
        ids = [decoder.add(request) for request in (long, *short)]
        blocks = None
        for _ in range(12):
            decoder.step()
            running = {state.index: state for state in decoder.rounds.running}
            if ids[0] in running:
                state = running[ids[0]]
                blocks, length = list(state.blocks), state.position
        size = decoder.config.block_size
        slots = [blocks[p // size] * size + p % size for p in range(length - decoder.config.query_len)]
        return [cache.key.flatten(0, 1)[slots].clone() for cache in decoder.drafter.caches]

    switched, chains = (
        caches(make_decoder(shadow, **settings))
        for settings in (mixed({2: "tree", 4: 3}), {"num_speculative_tokens": 3})
    )
    for one, other in zip(switched, chains, strict=True):
        rows = min(one.shape[0], other.shape[0])
        assert rows > 9
        assert (one[:rows] - other[:rows]).abs().max() < 1e-5


def test_a_seed_gives_the_tokens_of_the_target_alone(make_decoder, requests, shadow):
    """In batches that verify trees or nothing, the target's own draw decides at every position."""
    asked = [replace(one, temperature=(0.5, 0.0, 1.1)[i % 3], seed=7 * i) for i, one in enumerate(requests)]
    wanted = tokens(make_decoder(None, sampled=True).generate(asked))
    decoder = make_decoder(shadow, sampled=True, decode="merged", **mixed({2: "tree", 4: 0}))
    assert tokens(decoder.generate(asked)) == wanted
    assert decoder.metrics.accepted[0] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_schedule": {4: 2}}, "names no 'tree'.*4:tree,16:3"),
        ({"tree": None}, "has 'tree', and the shape of the tree is missing"),
        ({"num_speculative_tokens": 2}, "2, and the draft tree has 3 steps"),
        ({"draft_schedule": {2: "tree"}}, "ends at 2 requests"),
        ({"draft_schedule": {2: "tree", 4: 9}}, "K is 0 to num_speculative_tokens = 3"),
    ],
)
def test_refusals(make_decoder, shadow, changes, words):
    with pytest.raises(ConfigError, match=words):
        make_decoder(shadow, **mixed({2: "tree", 4: 2}) | changes)


def test_requests_that_reach_max_model_len(make_decoder, shadow):
    """Their last nodes lie behind max_model_len, in slots that a request of a batch of chains has too."""
    asked = [Request(prompt_token_ids=prompt(n, seed=n), max_tokens=100) for n in (50, 60, 63, 30)]
    wanted = tokens(make_decoder(None).generate(asked))
    decoder = make_decoder(shadow, decode="merged", **mixed({2: "tree", 4: 2}))
    assert tokens(decoder.generate(asked)) == wanted
    assert [len(got) for got in wanted] == [14, 4, 1, 34]
    assert set(decoder.metrics.drafts_by_k) == {2, 3}

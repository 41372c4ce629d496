"""Rounds of every lowering, read at once or a round late: the tokens of requests decoded alone and eagerly."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import pytest
import torch
from decoder.pair_decoder import make_pair_decoder
from draft.pairs import DRAFTERS, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prompts import prompt
from specgraph_run import load_generator
from specgraph_run.decoder import Request, round_times

from specgraph.capture.transfers import HostCopy
from specgraph.device import LOWERINGS
from specgraph.draft import DraftTree
from specgraph.errors import CapacityError, ConfigError, SpecgraphError

SHAPES = ((1, 6), (5, 9), (12, 4), (9, 7), (3, 1), (7, 30))
"""Prompt tokens and tokens to generate; the last one ends at max_model_len."""
MAX_MODEL_LEN = 32
TREE = DraftTree(num_steps=3, top_k=2, num_draft_tokens=7)
CANDIDATES = (1, 2, 3)
WAYS = [
    *((lowering, "device", 1) for lowering in LOWERINGS),
    ("merged", "device", 0),
    ("merged", "host", 1),
    ("step", "host", 0),
]
"""Lowering, lengths and rounds ahead."""
DECODERS = [(DRAFTERS[i % len(DRAFTERS)], *way, i % 2 == 0, None if i % 4 < 2 else 13) for i, way in enumerate(WAYS)]
"""Kind, way, sampled and KV blocks: each way and each kind, in few decoders, since capturing one takes longer than to
decode an example."""
CHANGING = [
    ("eagle", "merged", "device", 1, False, 16, None, (1, 3)),
    ("peagle", "merged", "host", 1, False, None, None, (1, 3)),
    ("mtp", "merged", "device", 1, False, 16, None, (1, 3)),
    ("eagle", "merged", "device", 0, False, None, ((1, "tree"), (4, 2))),
    ("eagle", "merged", "device", 1, False, 16, ((1, 3), (2, "tree"), (4, 0))),
]
"""Decoders whose K is drawn anew for each launch, or that draft trees and chains by batch; host lengths have no
ancestor mask. Greedy, since sampled tokens depend on K."""


def make_decoder(kind, lowering, lengths="device", **changes):
    settings = {"max_num_requests": 4, "max_model_len": MAX_MODEL_LEN, "capture_sizes": [4]}
    return make_pair_decoder(kind, lengths, **(settings | {"decode": lowering, **changes}))


@cache
def kept(kind, decode, lengths, ahead, sampled, num_blocks=None, schedule=None, candidates=None):
    """One decoder for many examples: what an example leaves behind must not matter to the next."""
    schedule = None if schedule is None else dict(schedule)
    sizes = list(schedule or ((4,) if candidates is None else (1, 4)))
    return make_decoder(
        kind, decode, lengths, capture_sizes=sizes, rounds_ahead=ahead, sampled=sampled, num_blocks=num_blocks,
        draft_schedule=schedule, tree=TREE if "tree" in (schedule or {}).values() else None,
        k_candidates=candidates,
        round_times=None if candidates is None else {size: dict.fromkeys(candidates, 1.0) for size in sizes},
    )  # fmt: skip


def request(index, temperature=0.0, stops=()):
    length, count = SHAPES[index]
    ids = [token % VOCAB for token in prompt(length, seed=length)]
    return Request(
        prompt_token_ids=ids, max_tokens=count, temperature=temperature, seed=index, stop_token_ids=tuple(stops)
    )


@cache
def alone(kind, index, temperature):
    """Return what eager decoding gives for one request, with nobody else there."""
    decoder = make_decoder(kind, "eager", sampled=temperature > 0)
    result = decoder.generate([request(index, temperature)])[0]
    assert result.finish_reason == "length"
    return tuple(result.token_ids)


def up_to_stop(tokens, stops):
    """The tokens up to the first stop token, and the finish reason."""
    for place, token in enumerate(tokens):
        if token in stops:
            return list(tokens[: place + 1]), "stop"
    return list(tokens), "length"


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_arrivals_stops_cancellations_and_kv_pressure(data):
    made = data.draw(st.sampled_from(DECODERS))
    check_random_requests(data, kept(*made), kind=made[0], sampled=made[4])


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_arrivals_while_k_or_trees_change_in_flight(data):
    made = data.draw(st.sampled_from(CHANGING))
    decoder = kept(*made)
    if decoder.rounds.adaptive is not None:
        # Not drawn by hypothesis at each launch: their number also depends on the K that the last example ended with.
        order = Random(data.draw(st.integers(0, 999)))
        decoder.rounds.adaptive.choose = lambda num_rows: order.choice(made[-1])
    check_random_requests(data, decoder, kind=made[0], sampled=False, least=5)


def check_random_requests(data, decoder, kind, sampled, least=1):
    """Requests that arrive, stop and are cancelled at random get what each gets alone, and give their blocks back."""
    expected, tokens, reasons = {}, {}, {}

    def step():
        for chunk in decoder.step():
            assert chunk.request not in reasons, "nothing comes after the last chunk"
            tokens.setdefault(chunk.request, []).extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                reasons[chunk.request] = chunk.finish_reason

    for _ in range(data.draw(st.integers(least, 8))):
        index, temperature = data.draw(st.integers(0, len(SHAPES) - 1)), 0.8 if data.draw(st.booleans()) else 0.0
        full = alone(kind, index, temperature if sampled else 0.0)
        stops = data.draw(st.sampled_from([(), (full[len(full) // 2], VOCAB - 1), (full[0],)]))
        added = decoder.add(request(index, temperature if sampled else 0.0, stops))
        expected[added] = up_to_stop(full, stops)
        for _ in range(data.draw(st.integers(0, 3))):
            step()
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(sorted(expected)))
            if decoder.cancel(victim):
                expected[victim] = (expected[victim][0], "cancelled")
            assert not decoder.cancel(victim)
    while decoder.num_unfinished:
        step()
    for added, (wanted, reason) in expected.items():
        got = tokens.get(added, [])
        assert (got, reasons[added]) == (wanted[: len(got)] if reason == "cancelled" else wanted, reason)
    assert decoder.allocator.num_free == decoder.allocator.capacity
    assert decoder.step() == []


@pytest.mark.parametrize("ahead", [0, 1])
def test_k_follows_the_batch_while_rounds_are_in_flight(ahead):
    decoder = kept("eagle", "merged", "device", ahead, False, None, ((1, 3), (2, 1), (4, 0)))
    results = decoder.generate([request(index) for index in range(len(SHAPES))])
    assert [tuple(result.token_ids) for result in results] == [alone("eagle", i, 0.0) for i in range(len(SHAPES))]
    used = {d.num_speculative_tokens for d in decoder.drafter.graphs.descriptors}
    assert used == {0, 1, 3}


@pytest.mark.parametrize("kind", ["eagle", "mtp-modules", "dflash", "draft-model"])
def test_a_joining_request_has_its_row_and_nobody_elses(kind):
    """Row 1 of 3, between rows of other requests, against what the request says and its prompt's passes left."""
    decoder = make_decoder(kind, "merged", sampled=True)
    rounds, memory = decoder.rounds, decoder.target.shared
    others = [request(5, 0.7, (9,)), request(3), request(0)]
    for each in others:
        decoder.add(each)
    for _ in range(3):
        decoder.step()
    rounds.leave(rounds.rows[1])
    tensors = {name.removeprefix("shared."): tensor for name, tensor in memory.named_tensors("shared").items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    hidden, rows = decoder.drafter.prefill_buffers.aux_hidden, rounds._query_len
    asked = request(2, 0.8, (5, 11))
    decoder.add(asked)
    decoder._admit()
    joined, length = rounds.rows[1], len(asked.prompt_token_ids)
    blocks = [*joined.blocks, *[0] * (memory.block_table.shape[1] - len(joined.blocks))]
    expected = {
        "block_table": blocks,
        "temperature": [torch.tensor(0.8).item()],
        "seeds": [asked.seed],
        "start_positions": [length - 1],
        "num_sampled": [1],
        "aux_hidden": [*hidden[(length - 1) % 8].tolist(), *[0.0] * (rows - 1) * hidden.shape[1]],
        "sampled_token_ids": [alone(kind, 2, 0.8)[0]],
    }
    for name, values in expected.items():
        per_row = rows if name in ("aux_hidden", "sampled_token_ids") else 1
        first = tensors[name][per_row : per_row + len(values) // max(tensors[name][0].numel(), 1) or 1]
        assert first.flatten().tolist() == values, name
        untouched = before[name].clone()
        untouched[per_row : per_row + first.shape[0]] = first
        assert torch.equal(tensors[name], untouched), name


@pytest.mark.parametrize("count", [0, 5])
def test_a_count_that_no_running_request_can_have_is_named_with_its_row(monkeypatch, count):
    decoder, read = make_decoder("eagle", "merged"), HostCopy.read
    decoder.add(request(1))
    decoder.step()
    sampled_end = decoder.target.shared.sampled_token_ids.shape[0]

    def changed(copy):
        results = read(copy).clone()
        results[sampled_end:].view(torch.int32)[0] = count
        return results

    monkeypatch.setattr(HostCopy, "read", changed)
    seen = f"a round with K 3 has {count} tokens in row 0 for request 0: it takes 1 to K \\+ 1"
    with pytest.raises(SpecgraphError, match=seen):
        decoder.step()


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("ahead", [0, 1])
def test_drafts_are_counted_by_the_k_that_they_had(ahead, k):
    """Requests that end together: those of a batch that shrinks are drafted for one round later than in eager. With K 0
    for large batches there is nothing to count."""
    rounds, schedule = {"rounds_ahead": ahead}, {1: 3, 4: k}
    by_k = []
    for lowering, changes in (("eager", {}), ("merged", rounds)):
        decoder = make_decoder("eagle", lowering, draft_schedule=schedule, capture_sizes=[1, 4], **changes)
        for requests in ([request(5)], [request(5)] * 4):
            decoder.generate(requests)
        by_k.append(decoder.metrics.drafts_by_k)
    assert set(by_k[0]) == {k, 3} - {0}
    assert by_k[1] == by_k[0]


@pytest.mark.parametrize("ahead", [0, 1])
def test_acceptance_is_followed_and_counted_by_the_k_of_each_round(ahead):
    """One request, and K that changes with every launch."""
    decoder = make_decoder(
        "eagle", "merged", rounds_ahead=ahead, k_candidates=CANDIDATES, max_num_requests=1, capture_sizes=[1],
        round_times={1: dict.fromkeys(CANDIDATES, 1.0)},
    )  # fmt: skip
    policy, order, seen = decoder.rounds.adaptive, [2, 3, 1, 3, 2, 1, 2, 3, 1] * 4, []
    chosen, observe = iter(order), policy.acceptance.observe
    policy.choose = lambda num_rows: next(chosen)
    policy.acceptance.observe = lambda k, accepted: (seen.append((k, [*accepted])), observe(k, accepted))
    decoder.add(request(5))
    _, *rounds = [chunk for _ in range(len(order)) for chunk in decoder.step()]
    assert len(rounds) > 3
    assert [(k, [len(chunk.token_ids) - 1]) for k, chunk in zip(order, rounds[:-1], strict=False)] == seen[:-1]
    assert [k for k, _ in seen] == order[: len(rounds)]
    assert decoder.metrics.drafts_by_k == Counter(order[: len(rounds)])


def test_k_settles_on_what_acceptance_makes_best_and_repeats():
    times = {4: {1: 500.0, 2: 590.0, 3: 680.0}}
    for rate, best, lowering, repeats in ((0.0, 1, "eager", 1), (1.0, 3, "merged", 2)):
        runs = []
        for _ in range(repeats):
            settings = {"synthetic_acceptance": rate, "k_candidates": CANDIDATES, "round_times": times}
            decoder = make_decoder("eagle", lowering, **settings)
            results = decoder.generate([request(5)] * 4)
            runs.append((results, decoder.metrics.drafts_by_k))
        assert runs[0] == runs[-1]
        used = runs[0][1]
        assert max(used, key=lambda k: used[k]) == best


@pytest.mark.parametrize("lengths", ["device", "host"])
def test_rounds_are_timed_for_each_size_and_k_and_leave_nothing(lengths):
    decoder = make_decoder("eagle", "merged", lengths, k_candidates=(1, 3), capture_sizes=[1, 4])
    times = decoder.rounds.adaptive.times
    assert {size: tuple(row) for size, row in times.items()} == dict.fromkeys((1, 4), (1, 3))
    assert all(time > 0 for row in times.values() for time in row.values())
    for kv in (*decoder.target.caches, *decoder.drafter.caches):
        assert not kv.key.any()
    assert not decoder.target.shared.block_table.any()
    results = decoder.generate([request(index) for index in range(len(SHAPES))])
    assert [tuple(result.token_ids) for result in results] == [alone("eagle", i, 0.0) for i in range(len(SHAPES))]


@pytest.mark.parametrize("num_blocks", [17, 6, 3])
def test_rounds_are_timed_with_few_blocks(num_blocks):
    """The requests of timed rounds share blocks then, which `debug` refuses of any other requests."""
    settings = {"k_candidates": (1, 3), "capture_sizes": [1, 4], "num_blocks": num_blocks, "max_model_len": 128}
    times = make_decoder("eagle", "merged", **settings).rounds.adaptive.times
    assert {size: tuple(row) for size, row in times.items()} == dict.fromkeys((1, 4), (1, 3))
    checked = make_decoder("eagle", "merged", debug=True, **settings)
    assert checked.rounds.adaptive is not None
    assert not checked.target.shared.num_sampled.any()


def test_requests_go_on_through_all_timed_rounds_where_max_model_len_is_small(monkeypatch):
    times = {size: {1: 1.0, 3: 1.0} for size in (1, 4)}
    decoder = make_decoder(
        "eagle", "merged", max_model_len=20, synthetic_acceptance=1.0, k_candidates=(1, 3), round_times=times,
        capture_sizes=[1, 4],
    )  # fmt: skip
    going_on = []

    def run_once(platform, run):
        run()
        going_on.append(int((decoder.target.shared.num_sampled > 0).sum()))
        return 1.0

    monkeypatch.setattr(round_times, "_time", run_once)
    round_times.measure_round_times(decoder.stages, decoder.drafter)
    assert going_on == [1, 1, 4, 4]


@pytest.mark.parametrize(("ahead", "sampled"), [(0, True), (1, False)])
def test_draft_trees(ahead, sampled):
    tree = {"tree": TREE, "sampled": sampled}
    asked = [request(index, 0.8 * sampled) for index in range(len(SHAPES))]
    eager, whole = (make_decoder("eagle", name, rounds_ahead=ahead, **tree) for name in ("eager", "merged"))
    assert whole.generate(asked) == eager.generate(asked)
    assert (whole.metrics.accepted, whole.metrics.num_drafts) == (eager.metrics.accepted, eager.metrics.num_drafts)


def test_a_stream_may_end_outside_of_inference_mode():
    generator = load_generator(platform="cpu", decode="merged", capture_sizes=[1], prefill_sizes=[64])
    with torch.inference_mode(False):
        for _ in range(2):
            with generator.stream_text("def read(self, size):\n", max_tokens=40, stop=["\n"]) as stream:
                texts = [piece.text for piece in stream]
        assert stream.finish_reason == "stop"
        assert "\n" not in "".join(texts)
        request_id = generator.add(generator.request("import os\n"))
        generator.step()
        assert generator.cancel(request_id)
        assert [chunk.finish_reason for chunk in generator.step()] == ["cancelled"]
    assert generator.decoder.allocator.num_free == generator.decoder.allocator.capacity
    generator.close()


def test_a_wrong_number_of_rounds_ahead_is_refused():
    with pytest.raises(ConfigError, match="rounds_ahead must be at most 1, got 2"):
        make_decoder("eagle", "merged", rounds_ahead=2)


def test_a_prompt_with_more_blocks_than_the_table_has_is_refused():
    decoder = kept("eagle", "merged", "device", 1, False)
    with pytest.raises(CapacityError, match="a prefill pass with 99 KV blocks: its block table holds"):
        decoder.target.prefill([1, 2], 0, range(1, 100))


@pytest.mark.parametrize("waiting", [0, 1])
def test_no_round_is_launched_for_requests_that_end_in_the_one_in_flight(waiting):
    """All drafts are accepted, so a round gives K + 1 tokens: as many rounds as that takes, and none behind them."""
    decoder = make_decoder("eagle3", "merged", synthetic_acceptance=1.0, max_num_requests=1, capture_sizes=[1])
    ids = request(0).prompt_token_ids
    decoder.generate([Request(prompt_token_ids=ids, max_tokens=9)])  # before it there is no acceptance to go by
    for count in (1, 2, 4, 5, 6, 9, 8, 13, 24):
        asked = [Request(prompt_token_ids=ids, max_tokens=count)] * (1 + waiting)
        before = decoder.rounds.num_rounds
        assert [len(result.token_ids) for result in decoder.generate(asked)] == [count] * len(asked)
        needed = -(-(count - 1) // 4)
        assert decoder.rounds.num_rounds - before == needed * len(asked)
    decoder.close()

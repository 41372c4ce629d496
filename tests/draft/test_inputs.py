"""Writing a round into the drafter's own memory, handing tensors over, and running with no request at all."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target
from draft.rounds import Rounds, caches_equal
from draft.test_drafters_bit_equal import make_drafter

from specgraph import CaptureError, ConfigError, ProposeBatch, StaleInputError

SETTINGS = {"num_speculative_tokens": 3, "max_num_requests": 5, "max_model_len": 48, "capture_sizes": [1, 2, 5]}


def fill(inputs, batch):
    """Write as an engine does that puts its results where they belong."""
    for field in fields(batch):
        into, values = getattr(inputs, field.name), getattr(batch, field.name)
        if values is None:
            continue
        if field.name == "block_table":
            into.zero_()
            into = into[:, : values.shape[1]]
        into.copy_(values)


@pytest.mark.parametrize("attention", ["device", "host"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_in_place_is_as_handed_over(kind, attention):
    """Larger and smaller batches in turns: what a larger one left behind must be inert in a smaller one."""
    head = make_head(kind, make_target())
    settings = {**SETTINGS, "sampled": True, "prefill_sizes": [4]}
    handed, placed = (make_drafter(head, "merged", attention, **settings) for _ in range(2))
    rounds = Rounds(handed.config, head.aux_size, VOCAB, head.dtype, seed=8)
    with torch.inference_mode():
        for n in (5, 1, 3, 2, 5, 4):
            batch = rounds.next(n)
            inputs = placed.inputs(n)
            assert inputs is placed.inputs(n)
            fill(inputs, batch)
            wanted, got = handed.propose(batch), placed.propose(inputs)
            assert torch.equal(got.token_ids, wanted.token_ids)
            assert torch.equal(got.probs, wanted.probs)
            assert caches_equal(placed.caches, handed.caches)
            assert placed.buffers.round.num_sampled[n : got.dispatch.descriptor.num_requests].eq(0).all()


def test_views_are_overwritten_and_copies_are_not():
    drafter = make_drafter(make_head("eagle", make_target()), "merged", "device", **SETTINGS)
    rounds = Rounds(drafter.config, drafter.head.aux_size, VOCAB, torch.float32, seed=1)
    with torch.inference_mode():
        first = rounds.next(2)
        views, copies = drafter.propose(first, copy=False), drafter.propose(first)
        assert torch.equal(views.token_ids, copies.token_ids)
        before = copies.token_ids.clone()
        while torch.equal(views.token_ids, before):
            drafter.propose(rounds.next(2))
        assert torch.equal(copies.token_ids, before)


@pytest.mark.parametrize("lowering", ["eager", "step", "merged"])
@pytest.mark.parametrize("attention", ["device", "host"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_idle_propose_writes_nothing_and_later_ones_are_unchanged(kind, attention, lowering):
    head = make_head(kind, make_target())
    busy, rested = (make_drafter(head, lowering, attention, **SETTINGS, prefill_sizes=[4]) for _ in range(2))
    rounds = Rounds(busy.config, head.aux_size, VOCAB, head.dtype, seed=3)
    with torch.inference_mode():
        for n in (5, 2):
            batch = rounds.next(n)
            assert torch.equal(rested.propose(batch).token_ids, busy.propose(batch).token_ids)
            before = dict(rested.launches)
            for size in (1, 3):
                rested.propose_idle(size)
            assert caches_equal(rested.caches, busy.caches)
            one = busy.launches["propose"] // busy.num_proposes
            assert rested.launches["propose"] == before.get("propose", 0) + 2 * one
    assert rested.num_proposes == busy.num_proposes + 4  # idle ones are launches too


def test_a_request_within_the_batch_may_be_inert():
    """Its drafts mean nothing, it writes no KV, and its neighbours draft what they draft without it."""
    head = make_head("eagle", make_target())
    alone, mixed = (make_drafter(head, "merged", "device", **{**SETTINGS, "capture_sizes": [5]}) for _ in range(2))
    rounds = Rounds(alone.config, head.aux_size, VOCAB, head.dtype, seed=6)
    batch = rounds.next(3)
    counts = batch.num_sampled.clone()
    counts[1] = 0
    outer = replace(
        batch,
        **{name: getattr(batch, name)[[0, 2]] for name in ("sampled_token_ids", "num_sampled", "start_positions")},
        **{name: getattr(batch, name)[[0, 2]] for name in ("block_table", "temperature", "seeds")},
        aux_hidden=batch.aux_hidden.view(3, 4, -1)[[0, 2]].flatten(0, 1),
    )
    with torch.inference_mode():
        got = mixed.propose(replace(batch, num_sampled=counts)).token_ids
        assert torch.equal(got[[0, 2]], alone.propose(outer).token_ids)
    assert caches_equal(mixed.caches, alone.caches)


def engine_tensors(config, aux_size, dtype, columns, sampled=True):
    """Persistent tensors of an engine for its largest batch, full of what is no round; its block table is narrower."""
    requests, rows = config.max_num_requests, config.query_len
    return ProposeBatch(
        sampled_token_ids=torch.full((requests, rows), VOCAB - 1),
        num_sampled=torch.full((requests,), rows, dtype=torch.int32),
        start_positions=torch.full((requests,), 3),
        aux_hidden=torch.full((requests * rows, aux_size), float("nan"), dtype=dtype),
        block_table=torch.ones(requests, columns, dtype=torch.int32),
        temperature=torch.ones(requests) if sampled else None,
        seeds=torch.zeros(requests, dtype=torch.int64) if sampled else None,
    )


@pytest.mark.parametrize(
    ("kind", "lowering", "attention"),
    [
        *((kind, "merged", "device") for kind in DRAFTERS),
        *(
            ("eagle", *way)
            for way in (("eager", "device"), ("piecewise", "device"), ("step", "host"), ("merged", "host"))
        ),
    ],
)
def test_bound_tensors_are_as_handed_over(kind, attention, lowering):
    """Two sets in turns; what a larger batch left in an engine's tensors is inert in a smaller one."""
    head = make_head(kind, make_target())
    settings = {**SETTINGS, "sampled": True, "prefill_sizes": [4]}
    handed, placed = (make_drafter(head, lowering, attention, capture=False, **settings) for _ in range(2))
    with torch.inference_mode():
        handed.capture()
    rounds = Rounds(handed.config, head.aux_size, VOCAB, head.dtype, seed=8)
    batches = [rounds.next(n) for n in (5, 1, 3, 2, 5, 4)]
    columns = max(batch.block_table.shape[1] for batch in batches)
    assert columns < placed.config.max_blocks
    sets = [placed.bind(engine_tensors(placed.config, head.aux_size, head.dtype, columns)) for _ in range(2)]
    with torch.inference_mode():
        placed.capture()
        for number, batch in enumerate(batches):
            inputs = placed.inputs(batch.num_requests, bound=sets[number % 2])
            assert inputs is placed.inputs(batch.num_requests, bound=sets[number % 2])
            fill(inputs, batch)
            wanted, got = handed.propose(batch), placed.propose(inputs)
            assert torch.equal(got.token_ids, wanted.token_ids)
            assert torch.equal(got.probs, wanted.probs)
            assert caches_equal(placed.caches, handed.caches)
    assert placed.launches == handed.launches


def test_bound_tensors_after_rounds_of_fewer_rows():
    """A schedule: rounds of K + 1 = 2 rows are the first columns, and their hidden states are packed."""
    head = make_head("eagle", make_target())
    settings = {**SETTINGS, "prefill_sizes": [4], "draft_schedule": {2: 3, 5: 1}}
    handed, placed = (make_drafter(head, "merged", "device", capture=False, **settings) for _ in range(2))
    tensors = engine_tensors(placed.config, head.aux_size, head.dtype, placed.config.max_blocks, sampled=False)
    bound = placed.bind(tensors)
    rounds = Rounds(placed.config, head.aux_size, VOCAB, head.dtype, seed=2)
    with torch.inference_mode():
        handed.capture()
        placed.capture()
        for n, query_len in ((5, 4), (3, 2), (2, 2), (1, 4), (5, 2)):
            batch = rounds.next(n)
            batch = replace(
                batch,
                sampled_token_ids=batch.sampled_token_ids[:, :query_len].contiguous(),
                num_sampled=batch.num_sampled.clamp(max=query_len),
                aux_hidden=batch.aux_hidden.view(n, 4, -1)[:, :query_len].flatten(0, 1),
            )
            inputs = placed.inputs(n, query_len, bound=bound)
            fill(inputs, replace(batch, temperature=None, seeds=None))
            assert torch.equal(placed.propose(inputs).token_ids, handed.propose(batch).token_ids)
            assert caches_equal(placed.caches, handed.caches)


def bound_drafter(change=None, decode="merged", **settings):
    """A drafter, bound tensors that `change` has changed before, and the drafter's config."""
    drafter = make_drafter(
        make_head("eagle", make_target()), decode, "device", capture=False, **SETTINGS, check_inputs=False, **settings
    )
    tensors = engine_tensors(drafter.config, drafter.head.aux_size, torch.float32, drafter.config.max_blocks)
    tensors = replace(tensors, **(change(tensors) if change else {}))
    return drafter, tensors, drafter.bind(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {"num_sampled": t.num_sampled.long()},
            r"num_sampled is \[5\] torch.int64, .* torch.int32",
        ),
        (lambda t: {"start_positions": t.start_positions[:4]}, r"start_positions is \[4\] .* expected \[5\]"),
        (lambda t: {"aux_hidden": t.aux_hidden[:-1]}, r"aux_hidden is \[19, .* expected \[20"),
        (lambda t: {"sampled_token_ids": t.sampled_token_ids[:, 1:]}, r"sampled_token_ids is \[5, 3\]"),
        (lambda t: {"block_table": torch.zeros(5, 99, dtype=torch.int32)}, r"block_table is \[5, 99\]"),
        (lambda t: {"seeds": None}, "a sampled drafter needs seeds"),
        (lambda t: {"aux_hidden": t.aux_hidden.to("meta")}, "aux_hidden is on meta: give a tensor on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_not_bound(change, message):
    with pytest.raises(ConfigError, match=message):
        bound_drafter(change, sampled=True)


def test_binding_comes_before_the_capture_and_belongs_to_one_drafter():
    drafter, tensors, bound = bound_drafter()
    drafter.capture()
    with pytest.raises(CaptureError, match=r"bind before capture\(\)"):
        drafter.bind(tensors)
    other, _, _ = bound_drafter()
    with pytest.raises(ConfigError, match="bound to another drafter"):
        other.inputs(1, bound=bound)


@pytest.mark.parametrize("name", ["sampled_token_ids", "num_sampled", "start_positions", "aux_hidden", "block_table"])
def test_bound_tensors_with_other_memory_are_refused(name):
    """Also without check_inputs."""
    drafter, tensors, bound = bound_drafter()
    drafter.capture()
    inputs = drafter.inputs(2, bound=bound)
    tensors.num_sampled.zero_()
    with torch.inference_mode():
        drafter.propose(inputs)
    launches = drafter.launches.copy()
    tensor = getattr(tensors, name)
    tensor.data = tensor.clone()
    with torch.inference_mode(), pytest.raises(StaleInputError, match=rf"'bound 1.{name}' was reassigned or moved"):
        drafter.propose(inputs)
    assert drafter.launches == launches

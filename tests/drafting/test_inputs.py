"""Writing a round into the drafter's own memory, handing tensors over, and running with no request at all."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from drafting.pairs import DRAFTERS, VOCAB, make_head, make_target
from drafting.rounds import Rounds, caches_equal
from drafting.test_drafters_bit_equal import make_drafter

SETTINGS = {"num_speculative_tokens": 3, "max_num_requests": 5, "max_model_len": 48, "capture_sizes": [1, 2, 5]}


def fill(inputs, batch):
    """As an engine does that writes its results where they belong."""
    for field in fields(batch):
        into, values = getattr(inputs, field.name), getattr(batch, field.name)
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

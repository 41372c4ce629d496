"""Writing a round into the drafter's own memory, handing tensors over, and running with no request at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import RandomBatches, make_drafter

from specgraph import ProposeBatch
from specgraph.errors import CaptureError, ConfigError, StaleInputError

SETTINGS = {
    "num_speculative_tokens": 3,
    "max_num_requests": 5,
    "max_model_len": 48,
    "capture_sizes": [1, 2, 5],
    "prefill": "eager",
}


def test_views_are_overwritten_and_copies_are_not():
    drafter = make_drafter(make_head("eagle", make_target()), "merged", "device", **SETTINGS)
    rounds = RandomBatches(drafter.config, drafter.head.aux_size, VOCAB, torch.float32, seed=1)
    with torch.inference_mode():
        first = rounds.next(2)
        views, copies = drafter.propose(first, copy=False), drafter.propose(first)
        assert torch.equal(views.token_ids, copies.token_ids)
        before = copies.token_ids.clone()
        while torch.equal(views.token_ids, before):
            drafter.propose(rounds.next(2))
        assert torch.equal(copies.token_ids, before)


def engine_tensors(config, aux_size, dtype, columns):
    """Persistent tensors of an engine for its largest batch, full of what is no round; its block table is narrower."""
    requests, rows = config.max_num_requests, config.query_len
    return ProposeBatch(
        sampled_token_ids=torch.full((requests, rows), VOCAB - 1),
        num_sampled=torch.full((requests,), rows, dtype=torch.int32),
        start_positions=torch.full((requests,), 3),
        aux_hidden=torch.full((requests * rows, aux_size), float("nan"), dtype=dtype),
        block_table=torch.ones(requests, columns, dtype=torch.int32),
        temperature=torch.ones(requests) if config.sampled else None,
        seeds=torch.zeros(requests, dtype=torch.int64) if config.sampled else None,
    )


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
        (lambda t: {"block_table": torch.zeros(5, 99, dtype=torch.int32)}, r"is \[5, 99\] .*: DraftConfig.max_blocks$"),
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


@pytest.mark.hazard("bound-tensors-of-other-rounds")
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

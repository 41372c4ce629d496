"""Promises to a host engine: captures leave KV alone, bound tensors are read, penalties and K by batch size hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph.capture import BatchDescriptor, GraphRunner
from specgraph.device import Platform
from specgraph.errors import ReadSetError, StaleInputError

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import adding, assert_usable, expect_equal, expect_refusal


@case(
    "drafting.inert-request-between-others",
    "Where only the device knows a round's numbers, an inert request between others changes nobody's drafts.",
    hazard="inert-request-between-others",
    cause="host lengths for as many requests as are live, and not up to the last live one",
)
def test_between(platform: Platform, attention: str, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", capture_sizes=(4,)), attention)
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    before = [(cache.key.clone(), cache.value.clone()) for cache in made.caches]
    expected = made.propose_to_host(batch)
    for cache, (key, value) in zip(made.caches, before, strict=True):
        cache.key.copy_(key)
        cache.value.copy_(value)
    counts = [count if r != 1 else 0 for r, count in enumerate(batch.num_sampled)]
    seen = made.propose_to_host(replace(batch, num_sampled=counts), host_numbers=False)
    for r in (0, 2, 3):
        expect_equal(seen.token_ids[r], expected.token_ids[r], f"drafts of request {r}, with request 1 inert")
        expect_equal(seen.hidden[r], expected.hidden[r], f"carried state of request {r}, with request 1 inert")


UNGUARDED = {"tensor": 4, "number": 1}
"""Name -> the elements of a tensor that is missing in the read set."""


@pytest.mark.parametrize("what", [*UNGUARDED, "reshaped"])
@case(
    "faults.undeclared-read-refused",
    "A capture that reads an unnamed tensor, of one element too, is refused by an error that names the op, and so is a "
    "replay whose tensor has another shape at the same address; the next capture works.",
    hazard="small-tensor-unguarded",
    cause="the guard doesn't see ops on this device, leaves small tensors out, or compares addresses only",
    quick=True,
)
def test_guard(platform: Platform, what: str) -> None:
    x = torch.zeros(4, 4, device=platform.device)
    named = {"x": x}
    runner = GraphRunner(platform, lambda: named, check_inputs=True)
    descriptor = BatchDescriptor("propose", 1, 1, 1)
    if what in UNGUARDED:
        other = torch.ones(UNGUARDED[what], device=platform.device)
        expect_refusal(
            lambda: runner.capture(descriptor, adding(x, other)), f"an unnamed {what}", "add", (ReadSetError,)
        )
        assert_usable(platform)
    runner.capture(descriptor, adding(x, 1))
    named["x"] = x.view(2, 8)
    expect_refusal(lambda: runner.replay(descriptor), "a replay of another shape", "", (StaleInputError,))
    runner.close()

"""Captured lowerings give the bits of eager at every K and precision, and agree with a dense float64 chain at each
draft step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, assert_same, compare, follow_oracle, rig, run
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import expect_equal


@case(
    "drafting.quick-check",
    "The platform's default lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="run the other drafting cases: each looks at one thing",
    quick=True,
)
def test_quick(platform: Platform, seed: int) -> None:
    compare(platform, make_config(decode="auto"), "paged", seed, sizes=[3, 4, 1])
    falls_to_0 = make_config(decode="auto", draft_schedule={1: 3, 4: 0}, prefill="eager")
    block_drafter = rig(platform, falls_to_0, "paged", "dflash")
    batches = make_batches(falls_to_0, block_drafter.head.aux_size, seed, [1, 4])
    eager = rig(platform, replace(falls_to_0, decode="eager"), "paged", "dflash")
    assert_same(run(block_drafter, batches), run(eager, batches))


@case(
    "drafting.quick-check-of-steps",
    "A graph per draft step gives the bits of eager, and drafts that are float64's, for a head whose later steps go on "
    "from the ones before.",
    hazard="acceptance-hidden",
    cause="an op between two draft steps, which one graph of the whole loop may not have",
    quick=True,
)
def test_quick_steps(platform: Platform, attention: str, seed: int) -> None:
    compare(platform, make_config(decode="step"), attention, seed, sizes=[3, 1])
    follow_oracle(platform, make_config(decode="step"), attention, seed, [3])


@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.lowering-equals-eager",
    "A captured lowering gives the draft tokens, hidden states and KV of eager, bit for bit, as batches change.",
    hazard="acceptance-hidden",
    cause="a captured kernel that differs from the eager one, or an input that its replay doesn't see",
)
def test_lowerings(platform: Platform, attention: str, lowering: str, k: int, seed: int) -> None:
    compare(platform, make_config(decode=lowering, k=k), attention, seed)


@case(
    "drafting.half-precision-equals-eager",
    "In bfloat16 a captured lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="a matmul that chooses another algorithm or workspace under capture",
)
def test_half(platform: Platform, attention: str, seed: int) -> None:
    compare(platform, make_config(decode="auto"), attention, seed, dtype=torch.bfloat16)


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.sampled-equals-eager",
    "Sampled drafts and their distributions are those of eager, bit for bit.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the graph, the padding or the draft step instead of seed and position",
)
def test_sampled(platform: Platform, lowering: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering, sampled=True), "paged", seed)


@case(
    "drafting.each-step-sees-one-more-token",
    "Each draft step attends to the one before it: drafts and KV are those of a dense float64 chain over the accepted "
    "tokens, at every length and block order, over seven steps.",
    hazard="per-step-lengths-not-updated",
    cause="positions, lengths or slots that are not moved on from draft step to draft step",
)
def test_each_step(platform: Platform, attention: str, seed: int) -> None:
    follow_oracle(platform, make_config(decode="auto", k=7), attention, seed, [3, 4, 1])


@pytest.mark.parametrize("numbers", ["host", "device"])
@case(
    "drafting.rejected-tokens-are-not-attended",
    "KV of rejected rows does not change a draft: lengths count the accepted tokens of this round only.",
    hazard="rejected-tokens-in-lengths",
    cause="host lengths are computed before the accepted counts are known",
)
def test_rejected(platform: Platform, attention: str, numbers: str, seed: int) -> None:
    config = make_config(decode="auto", k=4, capture_sizes=(4,))
    made, other = rig(platform, config, attention), rig(platform, config, attention)
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [3])
    batch = replace(batch, num_sampled=[1, 2, 1])
    aux = batch.aux_hidden.clone().view(3, config.query_len, -1)
    for r, count in enumerate((1, 2, 1)):
        aux[r, count:] *= -9
    a = made.propose_to_host(batch, host_numbers=numbers == "host")
    b = other.propose_to_host(replace(batch, aux_hidden=aux.flatten(0, 1)), host_numbers=numbers == "host")
    expect_equal(a.token_ids, b.token_ids, "drafts after other rejected tokens")
    expect_equal(a.hidden, b.hidden, "hidden states after other rejected tokens")

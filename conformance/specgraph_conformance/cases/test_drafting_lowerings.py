"""Each captured lowering gives the bits of eager: every K and precision, as batches change."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, compare, follow_oracle
from specgraph_conformance.draft_rig import make_config


@case(
    "drafting.quick-check",
    "The platform's default lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="run the other drafting cases: each looks at one thing",
    quick=True,
)
def test_quick(platform: Platform, seed: int) -> None:
    compare(platform, make_config(decode="auto"), "paged", seed, sizes=[3, 4, 1])


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


@case(
    "drafting.k-equals-two",
    "With two draft tokens, sizes, columns and rows are right.",
    hazard="k-equals-2",
    cause="sizes or columns that assume at least two later steps",
)
def test_k2(platform: Platform, seed: int) -> None:
    compare(platform, make_config(decode="auto", k=2), "paged", seed)
    follow_oracle(platform, make_config(decode="auto", k=2), "paged", seed, [4, 1])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.sampled-equals-eager",
    "Sampled drafts and their distributions are those of eager, bit for bit.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the graph, the padding or the draft step instead of seed and position",
)
def test_sampled(platform: Platform, lowering: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering, sampled=True), "paged", seed)

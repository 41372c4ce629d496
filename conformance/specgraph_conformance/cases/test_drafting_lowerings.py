"""Each captured lowering gives the bits of eager: every K and precision, as batches change."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, assert_same, compare, follow_oracle, rig, run
from specgraph_conformance.draft_rig import Round, make_batches, make_config


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


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.lowering-equals-eager",
    "A captured lowering gives the draft tokens, hidden states and KV of eager, bit for bit, as batches change.",
    hazard="acceptance-hidden",
    cause="a captured kernel that differs from the eager one, or an input that its replay doesn't see",
)
def test_lowerings(platform: Platform, attention: str, lowering: str, k: int, seed: int) -> None:
    compare(platform, make_config(decode=lowering, k=k), attention, seed)


@pytest.mark.parametrize("lowering", CAPTURED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@case(
    "drafting.half-precision-equals-eager",
    "In half precision a captured lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="a matmul that chooses another algorithm or workspace under capture",
)
def test_half(platform: Platform, attention: str, lowering: str, dtype: torch.dtype, seed: int) -> None:
    compare(platform, make_config(decode=lowering), attention, seed, dtype=dtype)


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.k-equals-two",
    "With two draft tokens, sizes, columns and rows are right.",
    hazard="k-equals-2",
    cause="sizes or columns that assume at least two later steps",
)
def test_k2(platform: Platform, lowering: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering, k=2), "paged", seed)
    follow_oracle(platform, make_config(decode=lowering, k=2), "paged", seed, [4, 1])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.two-drafters-on-one-platform",
    "Two drafters of one size, run in turn, draft what each drafts alone.",
    hazard="update-prefill-decode-mixed",
    cause="graphs, updates or pools are kept by size in a table that both share",
)
def test_two(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    config = make_config(decode=lowering, capture_sizes=(2, 4))
    one, other = rig(platform, config, attention), rig(platform, config, attention, kind="eagle3")
    alone = rig(platform, config, attention)
    batches = make_batches(one.config, one.head.aux_size, seed, [4, 2, 3])
    theirs = make_batches(other.config, other.head.aux_size, seed + 1, [3, 4, 1])
    interleaved: list[Round] = []
    for mine, their in zip(batches, theirs, strict=True):
        interleaved.append(one.round(mine))
        other.round(their)
    result = interleaved, one.host_caches()
    one.close()
    other.close()
    assert_same(result, run(alone, batches))

"""Sampled drafts: the column of each token, equality of all lowerings, repeatability from the seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph.device import LOWERINGS, Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, compare, rig
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import expect_equal


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.each-token-has-its-column",
    "Draft token k is in column k, and its distribution in row k, in every lowering.",
    hazard="draft-step-column",
    cause="the column is chosen by the host at capture, or written into a copy",
)
def test_columns(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(decode=lowering, k=5, sampled=True), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    cold = replace(batch, temperature=torch.zeros(4))
    made.drafter.buffers.draft_token_ids.fill_(-7)
    drafts = made.round(cold)
    assert drafts.probs is not None
    expect_equal(drafts.probs.argmax(dim=-1), drafts.token_ids, "the most likely token")
    expect_equal(drafts.probs.sum(dim=-1), torch.ones(4, 5))
    made.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.sampled-equals-eager",
    "Sampled drafts and their distributions are those of eager, bit for bit.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the graph, the padding or the draft step instead of seed and position",
)
def test_sampled(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering, sampled=True), attention, seed)

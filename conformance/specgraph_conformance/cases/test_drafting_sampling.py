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


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.sampled-repeats",
    "A sampled round repeats with its seeds, at any padding, and changes with other seeds or positions.",
    hazard="gumbel-seed-position",
    cause="noise that is not a function of seed and position alone",
)
def test_repeats(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(decode=lowering, k=5, sampled=True)
    made = rig(platform, config, "paged", kind="eagle3")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    hot = replace(batch, temperature=torch.full((4,), 5.0))
    first = made.round(hot).token_ids
    expect_equal(made.round(hot).token_ids, first)
    assert not torch.equal(made.round(replace(hot, seeds=batch.seeds + 1)).token_ids, first)
    uniform = torch.full((4,), 1e6)  # every token equally likely: only the noise decides
    flat = replace(batch, temperature=uniform, seeds=torch.full((4,), 9))
    draws = made.round(flat).token_ids
    assert len({tuple(row) for row in draws.tolist()}) > 1, "other positions, the same noise"
    assert any(len(set(row)) > 1 for row in draws.tolist()), "every draft step has the same noise"
    made.close()

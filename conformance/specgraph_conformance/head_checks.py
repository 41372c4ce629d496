"""A draft head of somebody's own, checked through the graphs of a platform, without a suite run or a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from specgraph.device import LOWERINGS, Platform
from specgraph.draft import DraftConfig

from specgraph_conformance.case import Absent
from specgraph_conformance.draft_comparison import assert_same, away_from_the_end, expect_oracle, run
from specgraph_conformance.draft_rig import DraftRig, close_rigs, make_batches, make_config
from specgraph_conformance.rig import expect_equal
from specgraph_conformance.tiny_models import VOCAB, Head

MakeHead = Callable[[torch.device, torch.dtype], Head]
"""`make(device, dtype)`: the head with the same weights for any device and dtype, float64 on the CPU included."""
SIZES = (4, 1, 3)


def check_head(
    platform: Platform,
    make: MakeHead,
    config: DraftConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[str]:
    """Expect that a head drafts through graphs what it drafts without, and what it drafts in float64.

    Random rounds of several sizes with rejections, padding and permuted blocks run in each lowering, and every draft,
    hidden state and KV entry must have the bits of the eager lowering. Then rounds are compared with the head itself in
    float64 with dense attention. The head's vocabulary must hold the token ids 0 to 63.

    Args:
        make: gives the head; called with the platform's device and `dtype`, and with the CPU and float64.
        config: of the drafter; small limits and K 3 by default. `lowering` is replaced.
        dtype: of the head on the device.

    Returns:
        The lowerings that were compared with eager; the platform refused the others.

    Raises:
        AssertionError: what differs, where and by how much.
        SpecgraphError: the head does something that can't be captured, such as reading a device value on the host.
    """
    try:
        return _compare_lowerings(platform, make, config or make_config(), dtype, seed)
    finally:
        close_rigs()


def _compare_lowerings(
    platform: Platform, make: MakeHead, config: DraftConfig, dtype: torch.dtype, seed: int
) -> list[str]:
    head, reference = make(platform.device, dtype), make(torch.device("cpu"), torch.float64)
    batches = make_batches(config, head.aux_size, seed, SIZES)
    eager = run(DraftRig(platform, head, replace(config, decode="eager")), batches)
    compared: list[str] = []
    for lowering in LOWERINGS:
        if lowering == "eager":
            continue
        try:
            made = DraftRig(platform, head, replace(config, decode=lowering))
        except Absent:
            continue
        assert_same(run(made, batches), eager)
        compared.append(lowering)
    made = DraftRig(platform, head, replace(config, decode="auto"))
    for batch in make_batches(config, head.aux_size, seed + 1, SIZES):
        expect_oracle(made, away_from_the_end(config, batch), reference)
    _expect_repeatable(made, seed)
    return compared


def _expect_repeatable(made: DraftRig, seed: int) -> None:
    """The same round twice gives the same drafts: nothing of the first is left in the head."""
    (batch,) = make_batches(made.config, made.head.aux_size, seed + 2, [2])
    first = made.propose_to_host(batch)
    expect_equal(made.propose_to_host(batch).token_ids, first.token_ids, "the drafts of a round that is repeated")


__all__ = ["VOCAB", "MakeHead", "check_head"]

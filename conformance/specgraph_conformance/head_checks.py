"""Checks of a user's own draft head through a platform's graphs, without a target and without running the suite."""

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
"""`make(device, dtype)` returns the head, with the same weights for any device and dtype, also for float64 on the
CPU."""
SIZES = (4, 1, 3)


def check_head(
    platform: Platform,
    make: MakeHead,
    config: DraftConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[str]:
    """Check that a head drafts the same tokens with graphs, without graphs and in float64.

    Each lowering proposes for random batches of several sizes, with rejections, padding and permuted blocks. Every
    draft, hidden state and KV entry must have the bits of the eager lowering. Then proposes are compared with the head
    itself in float64 with dense attention. The head's vocabulary must contain the token ids 0 to 63.

    Args:
        make: returns the head. It is called with the platform's device and `dtype`, and with the CPU and float64.
        config: the drafter's config. None for small limits and K = 3. `decode` is replaced.
        dtype: the dtype of the head on the device.

    Returns:
        The lowerings that were compared with eager. The platform refused the others.

    Raises:
        AssertionError: results differ. The message says which, at which place and by how much.
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
    """Check that two proposes for the same batch give the same drafts: the head keeps no state from the first."""
    (batch,) = make_batches(made.config, made.head.aux_size, seed + 2, [2])
    first = made.propose_to_host(batch)
    expect_equal(made.propose_to_host(batch).token_ids, first.token_ids, "the drafts of a round that is repeated")


__all__ = ["VOCAB", "MakeHead", "check_head"]

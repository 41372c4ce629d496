"""Ops of models that are split over ranks: each rank's part by the op, the whole by float64 on the host.

The collectives run in a group of one rank here: that shows what the op does with its tensors, eagerly and in a graph.
Between ranks they are tested by the group `collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.parallel import Ranks, join_ranks
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.op_run import RunInGraph
from specgraph_conformance.rig import expect_equal

RANKS = 4


@pytest.fixture
def ranks(platform: Platform, tmp_path: Path) -> Iterator[Ranks]:
    """One rank, over the device's own communication library."""
    joined = join_ranks(platform.device, 1, init_method=f"file://{tmp_path / 'store'}", rank=0)
    yield joined
    joined.close()


@case(
    "kernels.collectives-of-one",
    "One rank: all_reduce leaves its tensor as it is, all_gather gives a copy.",
    hazard="merged-chain-collectives",
    cause="all_reduce or all_gather: an uninitialised result, or the input itself instead of a copy",
    needs=("collectives_in_graph",),
)
def test_one_rank(platform: Platform, ranks: Ranks, seed: int) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed))
    given, total, copy = (x.clone() for _ in range(3))

    def body(there: Tensor, total: Tensor, copy: Tensor) -> None:
        total.copy_(there)
        ops.all_reduce(total, ranks.name)
        copy.copy_(ops.all_gather(there, ranks.name, 1))

    RunInGraph(platform)(body, given, total, copy, written=(total, copy))
    expect_equal(total, x)
    expect_equal(copy, x)

"""Collectives inside graphs, where the platform claims them.

In this process there is a group of one rank: that shows that collectives can be captured and are replayed, not that
ranks agree. What went wrong in the field is between ranks: see `test_collectives_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.parallel import Ranks

from specgraph_conformance.case import case
from specgraph_conformance.rank import check_chain, process_group
from specgraph_conformance.rig import captured, on_host, replay_and_wait

NEEDS = ("collectives_in_graph",)


@pytest.fixture
def group(platform: Platform, tmp_path: Path) -> Iterator[Ranks]:
    """A group of one rank."""
    with process_group(platform, 0, 1, str(tmp_path / "store")) as ranks:
        yield ranks


@pytest.mark.parametrize("count", [1, 2, 8])
@case(
    "collectives.chain-in-one-graph",
    "One rank: all-reduces and all-gathers, one to eight of each between dependent ops in one graph, are captured, and "
    "every replay gives what eager gives.",
    hazard="merged-chain-collectives",
    cause="the communication library allocates or synchronises in the capture, or its stream isn't joined to it",
    needs=NEEDS,
)
def test_chain(platform: Platform, group: Ranks, count: int, seed: int) -> None:
    check_chain(platform, group, count, seed)


@case(
    "collectives.gather-in-graph",
    "One rank: an all-gather in a graph copies what is in its input at each replay.",
    hazard="merged-chain-collectives",
    cause="the communication library allocates or synchronises in the capture",
    needs=NEEDS,
)
def test_gather(platform: Platform, group: Ranks) -> None:
    x, out = torch.zeros(64, device=platform.device), torch.zeros(64, device=platform.device)

    def body() -> None:
        out.copy_(ops.all_gather(x * 2, group.name, 1))

    graph = captured(platform, body)
    for value in (3.0, -1.0):
        x.fill_(value)
        replay_and_wait(platform, graph)
        assert on_host(out).unique().tolist() == [2 * value]

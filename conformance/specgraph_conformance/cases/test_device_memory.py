"""Memory that a platform counts, and small promises of streams and captures that an engine relies on."""

from __future__ import annotations

import gc

import torch
from specgraph.device import GraphPool, Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, replay_and_wait


@case(
    "replay.closing-frees-what-is-counted",
    "Memory of graphs counts as allocated while they live and not after, also where their pool was closed before them.",
    hazard="pool-closed-before-its-graphs",
    cause="a count that only grows, a pool that gives nothing back once it is closed, or memory of graphs that was "
    "handed to somebody else while they lived",
)
def test_counts(platform: Platform) -> None:
    x, pools = torch.ones(1 << 20, device=platform.device), list[GraphPool]()

    def once(pool_first: bool) -> tuple[int, int]:
        pool, kept = platform.graph_pool(), list[torch.Tensor]()
        graph = captured(platform, lambda: kept.append(x * 2), pool)
        replay_and_wait(platform, graph)
        kept.clear()
        closes = (pool.close, graph.close) if pool_first else (graph.close, pool.close)
        closes[0]()
        closes[1]()
        pools.append(pool)  # a closed pool keeps nothing, also while somebody keeps the pool
        del graph, closes
        gc.collect()
        return platform.memory().allocated, platform.memory().reserved

    once(False)
    allocated, reserved = once(False)
    for pool_first in (True, False, True, True):
        now = once(pool_first)
        assert now[0] <= allocated, f"{now[0] - allocated} bytes more are allocated after a graph came and went"
        assert now[1] <= reserved, f"{now[1] - reserved} bytes more are reserved after a graph came and went"

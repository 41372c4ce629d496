"""Memory that a platform counts, and small promises of streams and captures that an engine relies on."""

from __future__ import annotations

import gc

import torch
from specgraph.device import GraphPool, Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, on_host, replay_and_wait


@case(
    "replay.closing-frees-what-is-counted",
    "Memory of graphs counts as allocated while they live and not after, also where their pool was closed before them.",
    hazard="pool-closed-before-its-graphs",
    cause="a count that only grows, or a pool that gives nothing back once it is closed",
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


@case(
    "streams.record-event-takes-the-given-one",
    "`stream.record_event(event)` records that event and returns it.",
    cause="a new event is recorded instead of the one that was given",
    quick=True,
)
def test_record(platform: Platform) -> None:
    x, side = torch.zeros(1 << 16, device=platform.device), platform.stream()
    platform.synchronize()
    event = platform.event()
    with platform.use(side):
        x.add_(1)
        returned = side.record_event(event)
    assert returned is None or returned is event, "another event was returned"
    other = platform.stream()
    other.wait_event(event)
    with platform.use(other):
        x.add_(1)
    platform.synchronize()
    assert on_host(x).unique().tolist() == [2.0]

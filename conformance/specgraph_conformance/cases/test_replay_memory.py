"""Replays and graphs that come and go take no memory."""

from __future__ import annotations

import gc

import torch
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host


@case(
    "replay.ten-thousand-without-growth",
    "10,000 replays take no memory.",
    hazard="reset-leaks-pool",
    cause="replay() allocates, or keeps an event or a handle of each launch",
    timeout=180,
)
def test_growth(platform: Platform) -> None:
    x, out = torch.ones(64, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x.exp() * 2))
    for _ in range(10):
        graph.replay()
    platform.synchronize()
    gc.collect()
    before = platform.memory()
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            platform.synchronize()
    after = platform.memory()
    assert (after.allocated, after.reserved) <= (before.allocated, before.reserved)
    assert torch.allclose(on_host(out), (on_host(x)).exp() * 2)
    graph.close()


@case(
    "replay.closing-gives-memory-back",
    "Graphs that come and go take no more memory than the first of them.",
    hazard="reset-leaks-pool",
    cause="close() or reset() keeps the graph's share of the pool",
)
def test_closing(platform: Platform) -> None:
    x = torch.ones(1 << 20, device=platform.device)

    def once() -> int:
        graph = captured(platform, lambda: (x * 2).exp().sum())
        graph.replay()
        platform.synchronize()
        graph.close()
        del graph
        gc.collect()
        return platform.memory().reserved

    once()
    settled = once()
    assert max(once() for _ in range(6)) <= settled


@case(
    "replay.reset-gives-memory-back",
    "A graph that is reset and captured again takes no more memory each time.",
    hazard="reset-leaks-pool",
    cause="reset() keeps the graph's share of the pool",
)
def test_reset(platform: Platform) -> None:
    x = torch.ones(1 << 20, device=platform.device)
    platform.synchronize()
    graph = platform.graph()

    def once() -> int:
        with graph.capture():
            (x * 2).exp().sum()
        graph.replay()
        platform.synchronize()
        graph.reset()
        gc.collect()
        return platform.memory().reserved

    once()
    settled = once()
    assert max(once() for _ in range(6)) <= settled
    graph.close()


@case(
    "replay.many-graphs-live",
    "As many graphs as a drafter's size ladder needs live at once, and each replays right.",
    hazard="exec-budget",
    cause="a resource per graph (stream, event, exec) runs out; declare max_live_graphs",
    timeout=120,
)
def test_many(platform: Platform) -> None:
    limit = platform.capabilities.max_live_graphs
    count = 200 if limit is None else min(200, limit)
    x, out = torch.ones(32, device=platform.device), torch.zeros(32, device=platform.device)
    pool = platform.graph_pool() if platform.capabilities.shared_pool else None
    graphs = [captured(platform, lambda i=i: out.copy_(x * i), pool, warm_up=False) for i in range(count)]
    for i in (0, count // 2, count - 1):
        graphs[i].replay()
        platform.synchronize()
        expect_equal(on_host(out), on_host(x) * i)
    for graph in graphs:
        graph.close()

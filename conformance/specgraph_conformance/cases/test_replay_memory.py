"""Memory: replays, and graphs that come and go, don't use up any."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from specgraph.device import Graph, GraphPool, Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host, replay_and_wait


@case(
    "replay.ten-thousand-without-growth",
    "10,000 replays take no memory.",
    hazard="reset-leaks-pool",
    cause="replay() allocates, or keeps an event or a handle of each launch",
    timeout=180,
)
def test_growth(platform: Platform) -> None:
    x, out = torch.ones(64, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: out.add_(x * 2), warm_up=False)
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
    assert on_host(out).unique().tolist() == [2.0 * 10_010], "some of 10,010 replays wrote nothing"
    graph.close()


@pytest.mark.parametrize("way", ["close", "reset", "fail"])
@case(
    "replay.graphs-give-memory-back",
    "Graphs that are closed, or reset and captured again, or whose capture failed, take no more memory than the first "
    "of them.",
    hazard="reset-leaks-pool",
    cause="close(), reset() or a failed capture keeps the graph's share of the pool",
)
def test_memory_back(platform: Platform, way: str) -> None:
    x = torch.ones(1 << 20, device=platform.device)
    platform.synchronize()
    graph = platform.graph()

    def once() -> int:
        nonlocal graph
        with pytest.raises(ZeroDivisionError) if way == "fail" else nullcontext(), graph.capture():
            (x * 2).exp().sum()
            _ = 1 / (way != "fail")
        if way != "fail":
            replay_and_wait(platform, graph)
        if way == "reset":
            graph.reset()
        else:
            graph.close()
            graph = platform.graph()
        gc.collect()
        return platform.memory().reserved

    once()
    settled = once()
    most = max(once() for _ in range(6))
    assert most <= settled, f"{most - settled} bytes more are reserved after each {way} and another capture"
    graph.close()


@case(
    "replay.pool-may-be-closed-first",
    "After close() of a pool, the graphs in it still replay, whatever is allocated in the meantime.",
    hazard="pool-closed-under-graphs",
    cause="close() of a pool frees or reuses memory that its live graphs write; it must wait for their close()",
    needs=("shared_pool",),
)
def test_pool_first(platform: Platform) -> None:
    check_survives(platform, lambda pool, graph: pool.close())


@case(
    "replay.closing-one-graph-leaves-its-pool",
    "After close() of one graph, the other graphs of its pool still replay, whatever is allocated in the meantime.",
    hazard="graph-closes-shared-pool",
    cause="close() of a graph closes its pool although other graphs are in it: count the graphs of a pool",
    needs=("shared_pool",),
)
def test_graph_first(platform: Platform) -> None:
    check_survives(platform, lambda pool, graph: graph.close())


def check_survives(platform: Platform, close: Callable[[GraphPool, Graph], None]) -> None:
    """Capture two graphs in one pool, call `close(pool, first graph)`, allocate, and replay the second graph."""
    pool = platform.graph_pool()
    x = torch.arange(1 << 16, device=platform.device, dtype=torch.float32)
    out = torch.zeros_like(x)
    first = captured(platform, lambda: out.copy_((x * 5).sin()), pool)
    second = captured(platform, lambda: out.copy_((x * 2 + 1) * 3), pool)
    close(pool, first)
    gc.collect()
    other = captured(platform, lambda: (x * 7).exp())
    others = [torch.full_like(x, float("nan")) for _ in range(8)]
    for _ in range(2):
        x.add_(1)
        second.replay()
        replay_and_wait(platform, other)
        expect_equal(on_host(out), (on_host(x) * 2 + 1) * 3, "the replay after the close")
    assert len(others) == 8
    for graph in (first, second, other):
        graph.close()
    pool.close()


@case(
    "replay.a-shared-pool-is-shared",
    "A second graph in a pool reuses the memory that the first one's capture freed.",
    hazard="shared-pool-not-shared",
    cause="shared_pool is claimed, and graph(pool) allocates from memory of its own",
    needs=("shared_pool",),
)
def test_shared(platform: Platform) -> None:
    pool = platform.graph_pool()
    x, total = torch.ones(1 << 20, device=platform.device), torch.zeros(1, device=platform.device)

    def body() -> None:
        for i in range(8):  # two temporaries of 4 MiB at a time
            total.add_((x * i).exp().mean())

    first = captured(platform, body, pool)
    before = platform.memory().reserved
    second = captured(platform, body, pool)
    grown = platform.memory().reserved - before
    assert grown < 4 << 20, f"the second graph of one pool took {grown} bytes more; the first one's were free"
    first.close()
    second.close()
    pool.close()


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
        replay_and_wait(platform, graphs[i])
        expect_equal(on_host(out), on_host(x) * i)
    for graph in graphs:
        graph.close()

"""Cleaning up after captures and graphs: pools, random numbers, the collector, and graphs that were never closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from specgraph import ops
from specgraph.device import GraphPool, Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_close, expect_equal, on_host, replay_and_wait


def own_pool(platform: Platform) -> tuple[GraphPool, Tensor]:
    """Return an empty pool, and a tensor for captured ops to write."""
    return platform.graph_pool(), torch.ones(16, device=platform.device)


@case(
    "capture.pool-counts-its-graphs",
    "A pool counts the graphs captured in it: one more after a capture, none more after one that failed, one less when "
    "a graph is reset or closed.",
    hazard="pool-keeps-failed-capture",
    cause="graph(pool) makes another pool, a failed capture never leaves its pool, or a graph leaves it twice",
    needs=("shared_pool",),
    quick=True,
)
def test_counts(platform: Platform) -> None:
    pool, x = own_pool(platform)
    counts = [pool.num_graphs]
    first = captured(platform, lambda: x.add_(1), pool)
    counts.append(pool.num_graphs)
    failed = platform.graph(pool)
    with pytest.raises(ZeroDivisionError), failed.capture():
        x.add_(1)
        _ = 1 / 0
    counts.append(pool.num_graphs)
    second = captured(platform, lambda: x.mul_(2), pool)
    counts.append(pool.num_graphs)
    x.fill_(3)
    replay_and_wait(platform, second)
    assert on_host(x).unique().tolist() == [6.0], "the graph that was captured after a failed capture"
    first.close()
    counts.append(pool.num_graphs)
    second.reset()
    counts.append(pool.num_graphs)
    for graph in (first, second, failed):
        graph.close()
    counts.append(pool.num_graphs)
    pool.close()
    assert counts == [0, 1, 1, 2, 1, 0, 0], (
        f"the pool had {counts} graphs at first, after a capture, a failed capture, another capture, a close, a reset "
        "and at the end"
    )


@case(
    "capture.pool-is-renewed",
    "While a graph is in a pool, the next one is captured in the same vendor pool; after its last graph, in a new one.",
    hazard="retired-pool-reused",
    cause="the handle of a pool that the vendor has retired with its last graph goes to the next capture",
    needs=("shared_pool",),
    quick=True,
)
def test_renewed(platform: Platform) -> None:
    pool, x = own_pool(platform)
    first = captured(platform, lambda: x.add_(1), pool)
    second = captured(platform, lambda: x.add_(1), pool)
    retired = first.pool_handle
    assert second.pool_handle == retired, "two graphs of one pool were captured in two of the vendor's pools"
    first.close()
    second.close()
    third = captured(platform, lambda: x.add_(1), pool)
    assert third.pool_handle != retired, "a capture was given the vendor's pool that was released with its last graph"
    x.zero_()
    replay_and_wait(platform, third)
    assert on_host(x).tolist() == [1.0] * 16
    third.close()
    pool.close()


@case(
    "capture.random-numbers-advance",
    "After the same seed, replays draw the random numbers that eager calls draw.",
    cause="the device generator isn't registered with the graph: every replay draws the same numbers",
    needs=("random_in_graph",),
)
def test_random(platform: Platform) -> None:
    out = torch.zeros(2, 64, device=platform.device)

    def draw() -> None:
        for row in out:
            row.copy_(torch.randn_like(row))

    def drawn(draw: Callable[[], None]) -> Tensor:
        torch.manual_seed(7)
        rows: list[Tensor] = []
        for _ in range(3):
            draw()
            platform.synchronize()
            rows.append(on_host(out))
        return torch.cat(rows)

    graph, eager = captured(platform, draw), drawn(draw)
    for what in ("its first", "a second"):
        replayed = drawn(graph.replay)
        expect_equal(replayed, eager, f"random numbers of a graph after {what} capture")
        assert len({tuple(row) for row in replayed.tolist()}) == 6, "two draws gave the same numbers"
        graph.reset()
        with graph.capture():
            draw()


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@case(
    "capture.garbage-collection-restored",
    "The garbage collector is off during a capture and afterwards as it was, also after a capture that failed.",
    hazard="collector-left-off",
    cause="a collection in a capture frees another graph's memory, or capture() does not restore the collector",
    quick=True,
)
def test_collector(platform: Platform, enabled: bool) -> None:
    x, was = torch.ones(16, device=platform.device), gc.isenabled()
    platform.synchronize()
    seen: list[bool] = []
    (gc.enable if enabled else gc.disable)()
    try:
        graph = platform.graph()
        with graph.capture():
            seen.append(gc.isenabled())
            x.add_(1)
        seen.append(gc.isenabled())
        failed = platform.graph()
        with pytest.raises(ZeroDivisionError), failed.capture():
            _ = 1 / 0
        seen.append(gc.isenabled())
        graph.close()
    finally:
        (gc.enable if was else gc.disable)()
    wanted = [False, enabled, enabled]
    assert seen == wanted, f"the collector was on: {seen} in a capture, after it and after a failed one, not {wanted}"


@case(
    "replay.dropped-graph-leaves-its-pool",
    "A graph that nobody closed leaves its pool when its last reference is gone.",
    hazard="dropped-graph-keeps-memory",
    cause="Graph.__del__ does not reset the graph, or something keeps a reference to it",
    needs=("shared_pool",),
    quick=True,
)
def test_dropped(platform: Platform) -> None:
    pool, x = own_pool(platform)
    graph = captured(platform, lambda: x.add_(1), pool)
    replay_and_wait(platform, graph)
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None, "something keeps a graph that nobody uses"
    assert pool.num_graphs == 0, "a graph whose last reference is gone still holds its pool"
    pool.close()


@case(
    "replay.op-that-writes-and-returns",
    "An op that writes its arguments and returns a new tensor does both in each replay, and what follows reads both.",
    hazard="recorded-op-loses-its-result",
    cause="a recorder that runs such an op for its writes only, rebinds what it returned instead of writing it in "
    "place, or keeps an input's values of the capture (then replay.inputs-of-one-value-are-read fails too)",
    quick=True,
)
def test_writes_and_returns(platform: Platform, seed: int) -> None:
    device, generator = platform.device, torch.Generator().manual_seed(seed)
    rows, shape = 3, (3, 2, 8)
    query, key, value = (torch.zeros(shape, device=device) for _ in range(3))
    slots, positions = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    keys, values = (torch.zeros(4, 4, 2, 8, device=device) for _ in range(2))
    out, read = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def body() -> None:
        rotated = ops.rotate_and_store(
            query, ops.NewRows(key, value, None, positions, slots), ops.KVCache(keys, values)
        )
        out.copy_(rotated * 2)
        read.copy_(keys.view(16, 2, 8)[slots])

    graph = captured(platform, body)
    for number in (1, 2):
        given = [torch.randn(shape, generator=generator) for _ in range(3)]
        place = torch.randperm(12, generator=generator)[:rows] + 4
        for tensor, source in zip((query, key, value, slots), (*given, place), strict=True):
            tensor.copy_(source)
        replay_and_wait(platform, graph)
        expect_close(on_host(out), given[0].double() * 2, 1e-6, f"twice what the op returned in replay {number}")
        expect_equal(on_host(values).view(16, 2, 8)[place], given[2], f"what the op wrote in replay {number}")
        expect_equal(on_host(read), given[1], f"what a later op read of it in replay {number}")
    graph.close()

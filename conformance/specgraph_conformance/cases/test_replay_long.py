"""Work that takes a while: who waits for it, how many ops a graph holds, and a graph that is closed under it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from specgraph.device import Event, Platform, Stream

from specgraph_conformance.case import case
from specgraph_conformance.rig import (
    LONG_ADDITIONS,
    LONG_SIZE,
    captured,
    expect_equal,
    long_work,
    on_host,
    replay_and_wait,
    with_numbers,
)

Waits = Callable[[Platform, Stream, Event, Stream], object]
WAITS: dict[str, Waits] = {
    # (platform, the stream that works, an event recorded after the work, the stream that reads)
    "event.wait": lambda platform, works, event, reads: event.wait(reads),
    "wait_event": lambda platform, works, event, reads: reads.wait_event(event),
    "wait_stream": lambda platform, works, event, reads: reads.wait_stream(works),
    "event.synchronize": lambda platform, works, event, reads: event.synchronize(),
    "stream.synchronize": lambda platform, works, event, reads: works.synchronize(),
    "platform.synchronize": lambda platform, works, event, reads: platform.synchronize(),
}


@pytest.mark.parametrize("way", WAITS)
@case(
    "streams.long-work-is-waited-for",
    "Each way to wait for a replay on a side stream waits until all of it is done.",
    hazard="wait-returns-early",
    cause="the wait orders nothing, names another stream, or asks for the current stream only; or the replay was "
    "launched on another stream",
)
def test_long_work(platform: Platform, way: str) -> None:
    x, seen = torch.zeros(LONG_SIZE, device=platform.device), torch.zeros(LONG_SIZE, device=platform.device)
    works, reads = platform.stream(), platform.stream()
    graph = captured(platform, lambda: long_work(x), warm_up=False)
    for number in (1, 2):
        with platform.use(works):
            graph.replay()
            event = platform.event()
            event.record()
        WAITS[way](platform, works, event, reads)
        with platform.use(reads):
            seen.copy_(x)
        reads.synchronize()
        works.synchronize()
        platform.synchronize()
        values, wanted = on_host(seen).unique().tolist(), LONG_ADDITIONS * number
        assert values == [wanted], f"after {way} another stream saw {values} where {wanted} was to be seen"


@case(
    "replay.five-thousand-ops",
    "A graph of 5,000 ops, each of which needs the one before it, runs all of them in order.",
    hazard="graph-cut-off",
    cause="the runtime holds fewer nodes in a graph and drops the rest without an error, or loses what orders them",
)
def test_many_ops(platform: Platform) -> None:
    x, wanted = torch.arange(4, device=platform.device), torch.arange(4)
    graph = captured(platform, lambda: with_numbers(x, 2_500), warm_up=False)
    for number in (1, 2):
        replay_and_wait(platform, graph)
        with_numbers(wanted, 2_500)
        expect_equal(on_host(x), wanted, f"int64 after replay {number}")


@case(
    "replay.closed-while-it-runs",
    "What a replay writes is right, also where its graph is closed, and other memory allocated, before it is done.",
    hazard="closed-under-a-replay",
    cause="close() frees the memory of a graph, or the graph itself, without regard to a replay that still runs",
)
def test_closed_running(platform: Platform) -> None:
    x, out = torch.ones(LONG_SIZE, device=platform.device), torch.zeros(LONG_SIZE, device=platform.device)

    def body() -> None:
        y = x * 2
        for _ in range(LONG_ADDITIONS):
            y = y + 1
        out.copy_(y)

    for number in (1.0, 2.0):
        graph = captured(platform, body, warm_up=False)
        x.fill_(number)
        graph.replay()
        graph.close()
        del graph
        gc.collect()
        others = [torch.full((LONG_SIZE,), -1.0, device=platform.device) for _ in range(4)]
        platform.synchronize()
        assert on_host(out).unique().tolist() == [2 * number + LONG_ADDITIONS]
        assert all(on_host(other).unique().tolist() == [-1.0] for other in others)

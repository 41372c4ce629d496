"""Capture: the recorded ops, their stream, their pool, and their baked-in numbers."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Graph, Platform
from specgraph.errors import OrderError

from specgraph_conformance.case import case
from specgraph_conformance.rig import (
    captured,
    expect_equal,
    in_another_thread,
    on_host,
    replay_and_wait,
    with_numbers,
)

NUMBERS = 150
"""One capture has twice this number of ops, each with a baked-in number: more than a device might keep in a fixed
table."""


@case(
    "capture.runs-nothing",
    "Work issued in a capture is recorded and not run.",
    cause="capture() runs eagerly beside recording, or doesn't switch to the capturing stream",
    quick=True,
)
def test_runs_nothing(platform: Platform) -> None:
    x = torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: x.add_(1), warm_up=False)
    assert on_host(x).sum() == 0
    replay_and_wait(platform, graph)
    assert on_host(x).tolist() == [1.0] * 64


@case(
    "capture.graph-is-a-graph",
    "platform.graph() gives a specgraph.device.Graph, also where it wraps a vendor's object.",
    hazard="wrapper-hides-type",
    cause="graph() returns the vendor's graph or a wrapper that doesn't derive from Graph",
    quick=True,
)
def test_type(platform: Platform) -> None:
    graph = platform.graph()
    assert isinstance(graph, Graph), f"graph() gives a {type(graph).__name__}, which is no specgraph.device.Graph"
    assert not graph.is_closed
    assert graph.pool is not None


@case(
    "capture.is-capturing",
    "is_capturing() is true inside the block in this thread, false outside, in another thread, and where a stream is "
    "current that takes no part.",
    cause="is_capturing() asks a global flag, or the wrong stream",
    quick=True,
)
def test_is_capturing(platform: Platform) -> None:
    x, side, graph = torch.zeros(4, device=platform.device), platform.stream(), platform.graph()
    platform.synchronize()
    assert not platform.is_capturing()
    with graph.capture():
        x.add_(1)
        inside, elsewhere = platform.is_capturing(), in_another_thread(platform.is_capturing)
        with platform.use(side):
            beside = platform.is_capturing()
    assert not platform.is_capturing()
    assert (inside, elsewhere, beside) == (True, False, False)


@case(
    "capture.on-the-capture-stream",
    "capture() makes platform.capture_stream current inside the block, and the former one after it.",
    cause="capture() doesn't switch to the stream, or doesn't restore the current one",
    quick=True,
)
def test_capture_stream(platform: Platform) -> None:
    x = torch.zeros(4, device=platform.device)
    before = platform.current_stream()
    platform.synchronize()
    graph = platform.graph()
    with graph.capture():
        assert platform.current_stream() == platform.capture_stream
        x.add_(1)
    assert platform.current_stream() == before


@case(
    "capture.fork-and-join",
    "Work on a second stream, forked from the capture and joined to it, is part of the graph.",
    cause="use() inside a capture leaves it, waits between streams aren't recorded, or the pool gives memory that one "
    "stream has freed to another at once",
    needs=("fork_in_capture",),
    quick=True,
)
def test_fork(platform: Platform) -> None:
    x = torch.arange(8.0, device=platform.device)
    first, left, right, last, total = (torch.zeros(8, device=platform.device) for _ in range(5))
    side, another = platform.stream(), platform.stream()

    def body() -> None:
        first.copy_(x * 2)
        side.wait_stream(platform.current_stream())
        with platform.use(side):
            right.copy_(first + x)
        another.wait_stream(side)
        with platform.use(another):
            last.copy_(right - x)
        left.copy_(x * 2)
        platform.current_stream().wait_stream(side)
        platform.current_stream().wait_stream(another)
        total.copy_(left + right + last)

    graph = captured(platform, body, warm_up=False)
    for start in (1.0, 100.0):
        x.add_(start)
        replay_and_wait(platform, graph)
        expect_equal(on_host(total), on_host(x) * 7)


@case(
    "capture.waits-add-up",
    "In a capture a stream that waits for several others, and for an older event after a newer one, comes after all of "
    "them.",
    hazard="wait-forgets-earlier-waits",
    cause="a wait replaces what the stream already comes after, instead of adding to it: a legal capture is refused, "
    "or an edge of the graph is lost",
    needs=("fork_in_capture",),
    quick=True,
)
def test_waits(platform: Platform) -> None:
    x = torch.arange(8.0, device=platform.device)
    first, left, right, both, last = (torch.zeros(8, device=platform.device) for _ in range(5))
    one, two, three = (platform.stream() for _ in range(3))

    def body() -> None:
        main = platform.current_stream()
        first.copy_(x + 1)
        before = main.record_event()
        for stream in (one, two):
            stream.wait_event(before)
        with platform.use(one):
            left.copy_(first * 2)
        with platform.use(two):
            right.copy_(first * 3)
        for stream in (one, two):
            three.wait_stream(stream)
        with platform.use(three):
            both.copy_(left + right)
        main.wait_stream(three)
        main.wait_event(before)  # older than what it already comes after
        last.copy_(both + left)

    graph = captured(platform, body, warm_up=False)
    for start in (1.0, 100.0):
        x.add_(start)
        replay_and_wait(platform, graph)
        expect_equal(on_host(last), (on_host(x) + 1) * 7, "work of three streams")


@pytest.mark.parametrize("made", ["written", "returned"])
@case(
    "capture.missing-order-is-reported",
    "In a capture two streams that touch the same memory, one writing, without an order are an OrderError, also when "
    "the memory is the result of an op.",
    hazard="order-of-results-forgotten",
    cause="claimed, and the check forgets the memory that an op returns",
    needs=("order_detection", "fork_in_capture"),
)
def test_missing_order(platform: Platform, made: str) -> None:
    x, y, out = (torch.ones(8, device=platform.device) for _ in range(3))
    side, graph = platform.stream(), platform.graph()
    platform.synchronize()
    with pytest.raises(OrderError), graph.capture():
        side.wait_stream(platform.current_stream())
        with platform.use(side):
            shared = y.add_(1) if made == "written" else x * 2
        out.copy_(shared)
        platform.current_stream().wait_stream(side)
    assert not platform.is_capturing()


@case(
    "capture.scalars-are-baked",
    "A Python number is fixed at capture: changing the variable later does not change the replay.",
    cause="replay() runs Python code again instead of recorded work",
    quick=True,
)
def test_baked(platform: Platform) -> None:
    x, y = torch.zeros(4, device=platform.device), torch.arange(4, device=platform.device)
    step = 2.0

    def body() -> None:
        x.add_(step)
        x.add_(step)  # the same op again is one more op
        with_numbers(y, NUMBERS)

    graph = captured(platform, body, warm_up=False)
    step = 50.0
    replay_and_wait(platform, graph)
    assert on_host(x).tolist() == [4.0] * 4
    wanted = torch.arange(4)
    with_numbers(wanted, NUMBERS)
    expect_equal(on_host(y), wanted, f"what {2 * NUMBERS} ops in a row made of int64")

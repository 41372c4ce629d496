"""Replays, other work and external events: order that is missing is an error."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specgraph.errors import OrderError, UnsupportedError


@pytest.fixture
def writer(platform):
    """A graph that adds one to x."""
    x = torch.zeros(4)
    graph = platform.graph()
    with graph.capture():
        x.add_(1)
    return graph, x


def test_replay_and_unordered_eager_read(platform, side, writer):
    graph, x = writer
    graph.replay()
    with platform.use(side), pytest.raises(OrderError, match=r"aten\.sum.*aten\.add_"):
        x.sum()
    side.wait_stream(platform.current_stream())
    with platform.use(side):
        assert x.sum() == 4


def test_unordered_eager_write_and_replay(platform, side, writer):
    graph, x = writer
    with platform.use(side):
        x.fill_(5)
    with pytest.raises(OrderError):
        graph.replay()
    platform.current_stream().wait_stream(side)
    graph.replay()
    assert x.tolist() == [6.0] * 4


def test_two_replays_on_two_streams(platform, side, writer):
    graph, x = writer
    other = platform.graph()
    with other.capture():
        y = x * 2
    graph.replay()
    with platform.use(side), pytest.raises(OrderError):
        other.replay()
    event = platform.event()
    event.record()
    side.wait_event(event)
    with platform.use(side):
        other.replay()
    assert y.tolist() == [2.0] * 4


def test_graphs_of_one_pool_may_not_run_side_by_side(platform, side):
    """They share intermediates, even where their inputs and outputs are apart."""
    pool = platform.graph_pool()
    x, y = torch.ones(8), torch.ones(8)
    first, second = platform.graph(pool), platform.graph(pool)
    with first.capture():
        x.add_(x * 2)
    with second.capture():
        y.add_(y * 2)
    first.replay()
    with platform.use(side), pytest.raises(OrderError, match="same pool"):
        second.replay()


@pytest.mark.parametrize("sync", ["platform", "stream", "event"])
def test_waiting_on_the_host_orders(platform, side, writer, sync):
    graph, x = writer
    with platform.use(side):
        x.fill_(5)
    if sync == "platform":
        platform.synchronize()
    elif sync == "stream":
        side.synchronize()
    else:
        side.record_event().synchronize()
    graph.replay()
    assert x.tolist() == [6.0] * 4


def test_default_stream_work_is_tracked_where_asked(platform, side, writer):
    graph, x = writer
    with platform.checked():
        x.fill_(3)
    with platform.use(side), pytest.raises(OrderError):
        graph.replay()


def test_order_between_eager_streams(platform, side):
    third = platform.stream()
    x = torch.zeros(4)
    with platform.use(side):
        x.add_(1)
    with platform.use(third), pytest.raises(OrderError):
        x.add_(1)
    third.wait_event(side.record_event())
    with platform.use(third):
        x.add_(1)


def test_memory_used_again_by_the_allocator_is_no_conflict(platform, side):
    third = platform.stream()
    for _ in range(50):
        with platform.use(side):
            a = torch.zeros(1000)
        del a
        with platform.use(third):
            torch.ones(1000)


def test_tracking_does_not_grow(platform, side, writer):
    graph, x = writer
    for _ in range(300):
        graph.replay()
        side.wait_stream(platform.current_stream())
        with platform.use(side):
            x + 1
        platform.current_stream().wait_stream(side)
    log = platform.timeline._eager._entries
    assert sum(map(len, log.values())) < 10


def test_external_event_recorded_in_a_graph(platform, side):
    x, y = torch.zeros(4), torch.zeros(4)
    event = platform.event(external=True)
    graph = platform.graph()
    with graph.capture():
        x.add_(1)
        event.record()
        y.add_(1)
    graph.replay()
    side.wait_event(event)
    with platform.use(side):
        assert x.sum() == 4  # before the event
        with pytest.raises(OrderError):
            y.sum()  # after it


def test_external_event_waited_for_in_a_graph(platform, side):
    x = torch.zeros(4)
    event = platform.event(external=True)
    graph = platform.graph()
    with graph.capture():
        event.wait()
        x.add_(1)
    with pytest.raises(OrderError, match="would hang"):
        graph.replay()
    assert x.sum() == 0
    with platform.use(side):
        x.fill_(5)
    event.record(side)
    graph.replay()  # ordered after the fill by the event alone
    assert x.tolist() == [6.0] * 4


def test_timing_events(platform):
    start, end = platform.event(timing=True), platform.event(timing=True)
    with pytest.raises(UnsupportedError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    assert start.query()
    with pytest.raises(UnsupportedError, match="timing=True"):
        start.elapsed_time(platform.event())


def test_threads_on_streams_of_their_own_take_turns(platform):
    together = threading.Barrier(4, timeout=60)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number):
        total = torch.zeros(4)
        together.wait()
        for _ in range(60):
            stream = platform.stream()
            with platform.use(stream):
                total.add_(number)
            platform.synchronize()
        return float(total[0])

    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [60.0 * number for number in range(4)]
    finally:
        sys.setswitchinterval(interval)

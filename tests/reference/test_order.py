"""Streams and events: order that is missing is an error, in a capture and between replays and other work."""

# ruff: noqa: PT012  (a capture or update raises from its body or at its end: both belong in the block)
from __future__ import annotations

import gc

import pytest
import torch

from specgraph.errors import CaptureError, OrderError, UnsupportedError


@pytest.fixture
def side(platform):
    return platform.stream()


def fork_join(platform, side, body, *, fork=True, join=True):
    """A body that runs `body` on `side` beside its own work."""
    main = platform.current_stream()
    if fork:
        side.wait_stream(main)
    with platform.use(side):
        result = body()
    if join:
        main.wait_stream(side)
    return result


# ---- in a capture ---------------------------------------------------------------------------------------------------


def test_fork_and_join(platform, side):
    x, y = torch.ones(4), torch.ones(4)
    graph = platform.graph()
    with graph.capture():
        x.add_(1)
        doubled = fork_join(platform, side, lambda: x * 2)
        y.copy_(doubled)
    graph.replay()
    assert y.tolist() == [4.0] * 4


def test_conflict_in_a_capture(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(OrderError, match=r"aten\.mul.*test_order.*aten\.add_.*test_order"), graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        x.add_(1)  # after the fork: side doesn't know of it
        with platform.use(side):
            x * 2
        main.wait_stream(side)


def test_write_after_unordered_read(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        fork_join(platform, side, lambda: x * 2, join=False)
        x.add_(1)


def test_two_reads_need_no_order(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        a = x + 1
        with platform.use(side):
            b = x * 3
        main.wait_stream(side)
    graph.replay()
    assert (a.tolist(), b.tolist()) == ([2.0] * 4, [3.0] * 4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_disjoint_parts_of_one_tensor_need_no_order(platform, side, interleaved):
    """Interleaved columns: byte intervals overlap, elements don't."""
    x = torch.zeros(4, 6)
    mine, theirs = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:2], x[2:])
    graph = platform.graph()
    with graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        mine.add_(1)
        with platform.use(side):
            theirs.add_(2)
        main.wait_stream(side)
    graph.replay()
    assert (mine == 1).all()
    assert (theirs == 2).all()


def test_overlapping_columns_conflict(platform, side):
    x = torch.zeros(4, 6)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        side.wait_stream(platform.current_stream())
        x[:, ::2].add_(1)
        with platform.use(side):
            x[:, ::3].add_(2)


def test_a_block_freed_on_another_stream_is_not_reused_too_early(platform, side):
    """The block of `a` goes back to its stream while the side stream still reads it: the next writer conflicts."""

    def read_on_the_side_and_drop(a):
        fork_join(platform, side, lambda: a * 2, join=False)

    x = torch.ones(64)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        read_on_the_side_and_drop(x + 1)
        x + 3


def test_unjoined_fork(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(CaptureError, match="never joined"), graph.capture():
        fork_join(platform, side, lambda: x * 2, join=False)
    with graph.capture():
        fork_join(platform, side, lambda: x * 2)
    graph.replay()


def test_stream_that_takes_no_part(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(CaptureError, match="takes no part"), graph.capture(), platform.use(side):
        x.add_(1)


def test_capture_on_a_given_stream(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    platform.capture_stream = side
    with graph.capture():
        assert platform.current_stream() is side
        assert platform.is_capturing()
        x.add_(1)
    assert not platform.is_capturing()
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_plain_events_do_not_cross_the_border_of_a_capture(platform):
    x = torch.ones(4)
    before = platform.event()
    before.record()
    graph = platform.graph()
    with pytest.raises(CaptureError, match="outside of the capture"), graph.capture():
        before.wait()
    inside = platform.event()
    with graph.capture():
        x.add_(1)
        inside.record()
    with pytest.raises(CaptureError, match="only in a capture"):
        inside.wait()


# ---- between replays and other work ----------------------------------------------------------------------------------


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
        gc.collect()
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


# ---- external events -------------------------------------------------------------------------------------------------


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


def test_one_graph_records_what_another_waits_for(platform, side):
    x = torch.zeros(4)
    event = platform.event(external=True)
    producer, consumer = platform.graph(), platform.graph()
    with producer.capture():
        x.add_(1)
        event.record()
    with consumer.capture():
        event.wait()
        y = x * 2
    producer.replay()
    with platform.use(side):
        consumer.replay()
    assert y.tolist() == [2.0] * 4


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

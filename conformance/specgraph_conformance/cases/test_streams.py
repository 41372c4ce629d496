"""Streams and events: order, timing, threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specgraph.device import Platform
from specgraph.errors import OrderError
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import LONG_ADDITIONS, LONG_SIZE, in_another_thread, long_work, on_host

SIZE = 1 << 18


def zeros(platform: Platform) -> Tensor:
    """Return a tensor of zeros, large enough that missing order can show."""
    return torch.zeros(SIZE, device=platform.device)


@case(
    "streams.use-switches-and-restores",
    "use(stream) makes it current inside the block, nested too, and restores the former one after an exception.",
    cause="use() doesn't restore in a finally",
    quick=True,
)
def test_use(platform: Platform) -> None:
    default, one, two = platform.current_stream(), platform.stream(), platform.stream()
    assert one != two
    with platform.use(one):
        assert platform.current_stream() == one
        with platform.use(two):
            assert platform.current_stream() == two
            with platform.use(one):
                assert platform.current_stream() == one
            assert platform.current_stream() == two, "after a third use() the stream of the second is not current"
        assert platform.current_stream() == one, "after a nested use(two) the current stream is not `one` again"
    assert platform.current_stream() == default, "after use(one) the current stream is not the former one"
    with pytest.raises(ZeroDivisionError), platform.use(one):
        _ = 1 / 0
    assert platform.current_stream() == default, "after an exception in use(one) the former stream is not current"


@case(
    "streams.current-is-per-thread",
    "A thread's current stream is its own.",
    cause="the current stream is kept in the platform instead of the thread",
    quick=True,
)
def test_per_thread(platform: Platform) -> None:
    default, side = platform.current_stream(), platform.stream()
    with platform.use(side):
        assert in_another_thread(platform.current_stream) == default
        assert platform.current_stream() == side


@case(
    "streams.event-is-reusable",
    "An event recorded a second time marks the later point.",
    cause="record() keeps the first point, or a wait takes the last record when it runs instead of when it is issued",
    quick=True,
)
def test_reuse(platform: Platform) -> None:
    one, two = platform.stream(), platform.stream()
    x, rows = zeros(platform), [zeros(platform) for _ in range(8)]
    platform.synchronize()
    event = platform.event()
    for i, row in enumerate(rows):
        if i == 4:  # a device that runs one stream after the other may be right by chance
            platform.synchronize()
            one, two = two, one
        with platform.use(two):
            with platform.use(one):
                x.fill_(i)
                event.record()
            event.wait()  # waits for this record: the next record comes later
            row.copy_(x)
        one.wait_stream(two)
    platform.synchronize()
    for i, row in enumerate(rows):
        assert on_host(row).unique().tolist() == [float(i)], f"what waited for record {i + 1} of the event"


@case(
    "streams.events-time",
    "elapsed_time() is the time between two timing events in milliseconds, within what the host's clock saw; without "
    "timing=True it is an error.",
    hazard="elapsed-time-units",
    cause="timing=True isn't passed on, or the vendor's unit is handed through: seconds, or always 0",
    quick=True,
)
def test_timing(platform: Platform) -> None:
    start, end = platform.event(timing=True), platform.event(timing=True)
    x = zeros(platform)
    platform.synchronize()
    before = time.perf_counter()
    start.record()
    start.synchronize()
    after_start = time.perf_counter()
    while time.perf_counter() - after_start < 0.02:
        x.add_(1)
        platform.synchronize()
    before_end = time.perf_counter()
    end.record()
    platform.synchronize()
    after = time.perf_counter()
    # Also on a busy machine the start is reached before `after_start`, and the end after `before_end`.
    least, most = (before_end - after_start) * 1e3, (after - before) * 1e3
    seen = start.elapsed_time(end)
    assert 0.9 * least <= seen <= 1.1 * most + 0.1, (
        f"elapsed_time() is {seen:g}; by the host's clock {least:.1f} to {most:.1f} milliseconds passed"
    )
    plain = platform.event()
    plain.record()
    platform.synchronize()
    with pytest.raises(Exception, match=r"."):
        plain.elapsed_time(end)


@pytest.mark.parametrize("made", ["written", "returned"])
@case(
    "streams.missing-order-is-reported",
    "Two streams that touch the same memory, one writing, without an order are an OrderError, also when the memory is "
    "the result of an op.",
    hazard="order-of-results-forgotten",
    cause="claimed, and the conflict isn't found: the check forgets the memory that an op returns, say",
    needs=("order_detection",),
)
def test_missing_order(platform: Platform, made: str) -> None:
    x = zeros(platform)
    one, two = platform.stream(), platform.stream()
    platform.synchronize()
    with pytest.raises(OrderError):
        with platform.use(one):
            shared = x.fill_(1) if made == "written" else x * 2
        with platform.use(two):
            shared.add_(1)
        platform.synchronize()


@case(
    "streams.waits-add-up",
    "A stream that waits for several others, and for an older event after a newer one, comes after all of them.",
    hazard="wait-forgets-earlier-waits",
    cause="a wait replaces what the stream already comes after, instead of adding to it",
    quick=True,
)
def test_waits(platform: Platform) -> None:
    one, two, three = (platform.stream() for _ in range(3))
    x, y, total = (torch.zeros(LONG_SIZE, device=platform.device) for _ in range(3))
    platform.synchronize()
    for number in (1, 2):
        with platform.use(one):
            before = one.record_event()
            long_work(x)
        with platform.use(two):
            long_work(y)
        for stream in (one, two):
            three.wait_stream(stream)
        three.wait_event(before)  # older than what it already comes after
        with platform.use(three):
            total.copy_(x + y)
        for stream in (one, two):
            stream.wait_stream(three)
        platform.synchronize()
        assert on_host(total).unique().tolist() == [2.0 * LONG_ADDITIONS * number]


@case(
    "streams.own-streams-stay-own",
    "Of 100 streams that are handed out, none is the current stream, or the platform's own for captures or copies.",
    hazard="own-stream-handed-out",
    cause="a device that hands its streams out in turn comes back to those that the platform uses itself",
    quick=True,
)
def test_own(platform: Platform) -> None:
    own = {"current": platform.current_stream(), "capture": platform.capture_stream, "copy": platform.copy_stream}
    for number in range(100):
        made = platform.stream()
        taken = [name for name, stream in own.items() if made == stream]
        assert not taken, f"stream {number + 1} that was asked for is the platform's {taken[0]} stream"


@case(
    "streams.two-threads-work-at-once",
    "Threads that use streams of their own each get the result of their own work.",
    cause="state shared between threads without a lock",
)
def test_threads(platform: Platform) -> None:
    tensors = [zeros(platform) for _ in range(4)]
    everybody = threading.Barrier(4, timeout=30)
    platform.synchronize()

    def work(number: int) -> float:
        everybody.wait()
        stream = platform.stream()
        with torch.no_grad(), platform.use(stream):
            for _ in range(20):
                tensors[number].add_(number)
        stream.synchronize()
        return on_host(tensors[number])[-1].item()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [20.0 * i for i in range(4)]


@case(
    "streams.many-streams",
    "Sixteen streams can be had at once, and each works, also after a thousand streams and events have come and gone.",
    hazard="exec-budget",
    cause="streams are a scarce resource of this device: hand out from a fixed set; or their handles aren't released "
    "with their objects",
)
def test_many(platform: Platform) -> None:
    for _ in range(1000):
        stream, event = platform.stream(), platform.event()
        with platform.use(stream):
            event.record()
    streams = [platform.stream() for _ in range(16)]
    tensors, by_all = [torch.zeros(64, device=platform.device) for _ in streams], zeros(platform)
    platform.synchronize()
    for i, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
        if i:
            stream.wait_stream(streams[i - 1])
        with platform.use(stream):
            tensor.add_(i)
            by_all.mul_(2).add_(i)  # each thread's after the previous one's
    platform.synchronize()
    assert [on_host(tensor)[0].item() for tensor in tensors] == [float(i) for i in range(16)]
    assert on_host(by_all).unique().tolist() == [float(sum(i << 15 - i for i in range(16)))]

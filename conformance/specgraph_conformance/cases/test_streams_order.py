"""External events, and work that runs later than it is issued: queries, events of a stream, two graphs at once.

The cases about later work start long work and don't wait for it. They pass on a device that runs work at once.
"""

from __future__ import annotations

import time

import pytest
import torch
from specgraph.device import Platform
from specgraph.errors import UnsupportedError

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_streams import zeros
from specgraph_conformance.rig import LONG_ADDITIONS, LONG_SIZE, captured, long_work, on_host


@case(
    "streams.external-refused-if-absent",
    "Without the capability, event(external=True) is an UnsupportedError with its reason.",
    cause="the platform gives an ordinary event instead",
    unless=("external_events",),
    quick=True,
)
def test_external_absent(platform: Platform) -> None:
    support = platform.capabilities.external_events
    with pytest.raises(UnsupportedError) as caught:
        platform.event(external=True)
    assert support.reason in str(caught.value)


@case(
    "streams.external-record-is-seen-outside",
    "An external event recorded inside a graph orders work outside of it, at each replay.",
    cause="the captured record belongs to the capture only",
    needs=("external_events",),
)
def test_external_record(platform: Platform) -> None:
    x, y, seen = zeros(platform), zeros(platform), zeros(platform)
    event, side = platform.event(external=True), platform.stream()

    busy = torch.zeros(LONG_SIZE, device=platform.device)

    def body() -> None:
        long_work(busy)
        y.copy_(x * 2)
        event.record()

    graph = captured(platform, body, warm_up=False)
    main = platform.current_stream()
    for i in (3.0, 8.0):
        x.fill_(i)
        graph.replay()
        with platform.use(side):
            event.wait()
            seen.copy_(y)
        main.wait_stream(side)
        platform.synchronize()
        assert on_host(seen).unique().tolist() == [2 * i]


@case(
    "streams.external-wait-holds-the-graph",
    "A graph that waits for an external event sees what was done before its record.",
    hazard="update-dropped",
    cause="a wait captured before the event's first record is dropped by the runtime",
    needs=("external_events",),
)
def test_external_wait(platform: Platform) -> None:
    x, y, busy = zeros(platform), zeros(platform), torch.zeros(LONG_SIZE, device=platform.device)
    event, side = platform.event(external=True), platform.stream()
    platform.synchronize()
    graph = platform.graph()
    with graph.capture():
        event.wait()
        y.copy_(x * 2)
    main = platform.current_stream()
    for i in (3.0, 8.0):
        side.wait_stream(main)
        with platform.use(side):
            long_work(busy)
            x.fill_(i)
            event.record()
        graph.replay()
        side.wait_stream(main)
        platform.synchronize()
        assert on_host(y).unique().tolist() == [2 * i]


@case(
    "streams.query-follows-the-work",
    "Where a stream or an event says that its work is done, an event recorded there is reached, and another stream "
    "reads what was written without waiting.",
    hazard="query-before-the-work",
    cause="query() that is always true, asks for the current stream, or starts nothing that was not submitted yet",
)
def test_query(platform: Platform) -> None:
    x, seen = (torch.zeros(LONG_SIZE, device=platform.device) for _ in range(2))
    works = platform.stream()
    graph = captured(platform, lambda: long_work(x), warm_up=False)
    assert platform.event().query(), "an event that was never recorded is not done: nobody can wait for it"
    for number in (1, 2, 3):
        for asks_stream in (True, False):
            x.zero_()
            platform.synchronize()
            with platform.use(works):
                graph.replay()
                event = works.record_event()
                if asks_stream:
                    x.add_(1)  # it may not be submitted yet
            done = works.query() if asks_stream else event.query()
            while number == 3 and not done:  # a query alone must get all work started
                time.sleep(0)
                done = works.query() if asks_stream else event.query()
            reached = event.query()  # asked after the stream's answer
            if done:
                seen.copy_(x)  # no wait orders this stream: the query alone must be right
            platform.synchronize()
            what = f"{'stream' if asks_stream else 'event'}.query() was true after replay {number}"
            assert reached or not done, f"{what}, and an event that was recorded before is not reached"
            values = on_host(seen).unique().tolist()
            assert values == [LONG_ADDITIONS + asks_stream] or not done, f"{what}, and another stream read {values}"
            assert works.query(), "stream.query() is false after synchronize()"
            assert event.query(), "event.query() is false after synchronize()"


@case(
    "streams.record-event-is-of-its-stream",
    "`stream.record_event()` marks the work of that stream, also where another stream is current, by the event that it "
    "is given, if any.",
    hazard="event-of-the-current-stream",
    cause="record_event() records on the current stream, or a new event instead of the one that was given",
)
def test_record(platform: Platform) -> None:
    x, seen = torch.zeros(LONG_SIZE, device=platform.device), torch.zeros(LONG_SIZE, device=platform.device)
    works, reads = platform.stream(), platform.stream()
    graph = captured(platform, lambda: long_work(x), warm_up=False)
    given = platform.event()
    for number in (1, 2, 3):
        with platform.use(works):
            graph.replay()
        with platform.use(reads):
            returned = works.record_event() if number == 1 else works.record_event(given)
            assert number == 1 or returned is None or returned is given, "another event was returned"
            reads.wait_event(returned if number == 1 else given)
            seen.copy_(x)
        platform.synchronize()
        values = on_host(seen).unique().tolist()
        assert values == [LONG_ADDITIONS * number], f"a stream that waited for the event saw {values}"


@case(
    "replay.two-graphs-at-once",
    "Two graphs that were given no pool replay at the same time on two streams, and neither writes the other's memory.",
    hazard="one-pool-for-all",
    cause="graphs that were given no pool share one: scratch that the first capture dropped belongs to the second",
)
def test_at_once(platform: Platform) -> None:
    streams = [platform.stream() for _ in range(2)]
    x, busy, out = ([torch.zeros(LONG_SIZE, device=platform.device) for _ in streams] for _ in range(3))

    def body(i: int) -> None:
        scratch = x[i] * 2
        long_work(busy[i])
        out[i].copy_(scratch + 1)

    graphs = [captured(platform, lambda i=i: body(i), warm_up=False) for i in range(2)]
    for number in (3.0, 10.0, 40.0):
        for i, tensor in enumerate(x):
            tensor.fill_(number + i)
        platform.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with platform.use(stream):
                graph.replay()
        platform.synchronize()
        seen = [on_host(tensor).unique().tolist() for tensor in out]
        assert seen == [[2 * (number + i) + 1] for i in range(2)], f"two graphs at once gave {seen} of {number:g}"

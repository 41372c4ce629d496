"""Streams and graphs whose work runs later than it is issued: what a query says, whose event it is, two graphs at once.

Each case starts long work and does not wait for it. On a device that runs work when it is issued they pass.
"""

from __future__ import annotations

import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import LONG_ADDITIONS, LONG_SIZE, captured, long_work, on_host


@case(
    "streams.query-follows-the-work",
    "Where a stream or an event says that its work is done, an event recorded there is reached, and another stream "
    "reads what was written without waiting.",
    hazard="query-before-the-work",
    cause="query() that is always true, or asks for the current stream",
)
def test_query(platform: Platform) -> None:
    x, seen = (torch.zeros(LONG_SIZE, device=platform.device) for _ in range(2))
    works = platform.stream()
    graph = captured(platform, lambda: long_work(x), warm_up=False)
    for number in (1, 2, 3):
        for asks_stream in (True, False):
            x.zero_()
            platform.synchronize()
            with platform.use(works):
                graph.replay()
                event = works.record_event()
            done = works.query() if asks_stream else event.query()
            reached = event.query()  # later than the stream's answer
            if done:
                seen.copy_(x)  # on a stream that waits for nothing, where no platform checks the order
            platform.synchronize()
            what = f"{'stream' if asks_stream else 'event'}.query() was true after replay {number}"
            assert reached or not done, f"{what}, and an event that was recorded before is not reached"
            values = on_host(seen).unique().tolist()
            assert values == [LONG_ADDITIONS] or not done, f"{what}, and another stream read {values}"
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

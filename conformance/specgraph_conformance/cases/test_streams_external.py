"""External events: recorded and waited for inside graphs, visible outside of them."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Platform
from specgraph.errors import UnsupportedError

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_streams import zeros
from specgraph_conformance.rig import LONG_SIZE, captured, long_work, on_host


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

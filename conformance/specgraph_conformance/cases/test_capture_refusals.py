"""Refusals of a capture: platform, stream and pool are usable after each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from specgraph.device import Platform
from specgraph.errors import CaptureError, SpecgraphError
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import assert_usable, captured, on_host, replay_and_wait

HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: str(x.tolist()),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "print": lambda x: f"{x}",
}


@case(
    "capture.nesting-refused",
    "A capture inside a capture is a CaptureError, and the platform is usable after it.",
    hazard="capture-left-broken",
    cause="capture() doesn't look whether this thread captures already, or doesn't end the outer capture",
    quick=True,
)
def test_nesting(platform: Platform) -> None:
    x = torch.zeros(4, device=platform.device)
    outer, inner = platform.graph(), platform.graph()
    with pytest.raises(CaptureError), outer.capture():
        x.add_(1)
        with inner.capture():
            x.add_(1)
    assert_usable(platform)


@case(
    "capture.second-capture-refused",
    "A graph that holds a capture refuses another, and keeps the first.",
    cause="capture() overwrites; it should ask for reset()",
)
def test_twice(platform: Platform) -> None:
    x = torch.zeros(4, device=platform.device)
    graph = captured(platform, lambda: x.add_(1), warm_up=False)
    with pytest.raises(CaptureError), graph.capture():
        x.add_(100)
    replay_and_wait(platform, graph)
    assert on_host(x).tolist() == [1.0] * 4


@pytest.mark.parametrize("state", ["empty", "reset", "closed"])
@case(
    "capture.replay-without-a-capture-refused",
    "Replaying a graph that holds nothing, was reset or was closed is a CaptureError; one that was reset captures "
    "again, a closed one not, and closing twice is harmless.",
    cause="replay() passes an empty graph to the driver, reset() leaves the old recording behind, or close() doesn't "
    "mark the graph or frees twice",
    quick=True,
)
def test_empty(platform: Platform, state: str) -> None:
    x = torch.zeros(4, device=platform.device)
    graph = platform.graph() if state == "empty" else captured(platform, lambda: x.add_(1), warm_up=False)
    if state == "reset":
        graph.reset()
    if state == "closed":
        graph.close()
        assert graph.is_closed
        with pytest.raises(CaptureError), graph.capture():
            x.add_(1)
    with pytest.raises(CaptureError):
        graph.replay()
    if state == "reset":
        with graph.capture():
            x.add_(10)
        replay_and_wait(platform, graph)
        assert on_host(x).tolist() == [10.0] * 4
    graph.close()
    assert_usable(platform)


@pytest.mark.parametrize("read", HOST_READS)
@case(
    "capture.host-read-refused",
    "A host read of a device value in a capture is a CaptureError, and the platform is usable after it.",
    hazard="capture-left-broken",
    cause="the vendor's error leaves the stream capturing, or another exception type comes through",
    needs=("host_read_detection",),
    quick=True,
)
def test_host_read(platform: Platform, read: str) -> None:
    expect_refused(platform, read)


def expect_refused(platform: Platform, read: str, *swallowed: type[Exception]) -> None:
    """Check that a capture with a host read fails, also if its code swallows some errors, and that a new capture
    works."""
    x = torch.ones(4, device=platform.device)
    graph = platform.graph()
    with pytest.raises(CaptureError), graph.capture():
        y = x * 2
        with suppress(*swallowed):
            HOST_READS[read](y)  # the last op: one after it may end a vendor's task queue
    assert_usable(platform)
    with graph.capture():
        x.add_(1)
    replay_and_wait(platform, graph)
    assert on_host(x).tolist() == [2.0] * 4


@pytest.mark.parametrize("read", ["item", "bool", "nonzero", "mask"])
@case(
    "capture.swallowed-host-read-refused",
    "A host read whose error the captured code swallows fails the capture all the same, and the platform is usable "
    "after it.",
    hazard="swallowed-host-read",
    cause="the read raises and the capture goes on: what the code did in place of the value is in every replay",
    needs=("host_read_detection",),
    quick=True,
)
def test_swallowed(platform: Platform, read: str) -> None:
    expect_refused(platform, read, Exception)


@pytest.mark.parametrize("place", [0, 1, 2, 5, 11])
@case(
    "capture.exception-passes-through",
    "An exception of the captured code, after any number of ops, leaves the block as it is; the platform is usable, "
    "and the graph is empty and captures again.",
    hazard="capture-left-broken",
    cause="capture() ends the driver's capture only on some paths when its block raises",
    quick=True,
)
def test_exception(platform: Platform, place: int) -> None:
    x, out = torch.ones(32, device=platform.device), torch.zeros(32, device=platform.device)
    platform.synchronize()
    graph = platform.graph()
    before = platform.current_stream()

    def body(fail_at: int) -> None:
        y = x
        for i in range(12):
            if i == fail_at:
                _ = 1 / 0
            y = y * 2
        out.copy_(y)

    with pytest.raises(ZeroDivisionError), graph.capture():
        body(place)
    assert platform.current_stream() == before
    with pytest.raises(CaptureError):
        graph.replay()
    assert_usable(platform)
    with graph.capture():
        body(-1)
    replay_and_wait(platform, graph)
    assert on_host(out)[0].item() == 4096.0


@case(
    "capture.unjoined-fork-refused",
    "A forked stream that is never joined to the capture is a CaptureError, and the platform is usable after it.",
    hazard="capture-left-broken",
    cause="the vendor's error at the end of the capture isn't turned into CaptureError",
    needs=("fork_in_capture",),
    quick=True,
)
def test_unjoined(platform: Platform) -> None:
    x = torch.zeros(8, device=platform.device)
    side = platform.stream()
    platform.synchronize()
    graph = platform.graph()
    with pytest.raises(CaptureError), graph.capture():
        x.add_(1)
        side.wait_stream(platform.current_stream())
        with platform.use(side):
            x.add_(1)
    assert_usable(platform)


@case(
    "capture.fork-refused-if-absent",
    "Without the capability, a stream that waits for work of a capture is refused at the latest when the capture ends, "
    "and the platform is usable after it.",
    hazard="fork-passed-over",
    cause="the wait is passed over: the other stream's work runs at once, or is missing from the graph",
    unless=("fork_in_capture",),
    quick=True,
)
def test_fork_absent(platform: Platform) -> None:
    x, side = torch.zeros(8, device=platform.device), platform.stream()
    platform.synchronize()
    graph = platform.graph()
    with pytest.raises((SpecgraphError, RuntimeError)), graph.capture():
        x.add_(1)
        side.wait_stream(platform.current_stream())
        with platform.use(side):
            x.add_(1)
        platform.current_stream().wait_stream(side)
    assert_usable(platform)

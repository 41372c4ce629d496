"""Events whose record or wait is a node of a graph, seen outside of it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from specgraph_cuda.platform import CudaPlatform

from specgraph.device import Platform
from specgraph.errors import PlatformError, UnsupportedError


@pytest.fixture
def gpu(platform: Platform) -> Platform:
    if not platform.capabilities.external_events:
        pytest.skip(platform.capabilities.external_events.reason)
    return platform


def test_external_event_orders_a_replay_and_the_host(gpu: Platform) -> None:
    x = torch.zeros(1, device=gpu.device)
    event = gpu.event(external=True)
    graph = gpu.graph()
    with graph.capture():
        x.add_(1)
        event.record(gpu.current_stream())
    graph.replay()
    event.synchronize()
    assert x.item() == 1
    with pytest.raises(UnsupportedError):
        gpu.event(external=True, timing=True)


def test_events_made_in_a_capture_add_no_node(gpu: Platform) -> None:
    """torch has 32 streams and hands them out in turn, so one of 40 events would be recorded on the captured one."""
    graph, x, count = torch.cuda.CUDAGraph(keep_graph=True), torch.zeros(1, device=gpu.device), ctypes.c_size_t()
    with torch.cuda.graph(graph, stream=cast("Any", gpu.capture_stream), capture_error_mode="thread_local"):
        x.add_(1)
        for _ in range(40):
            gpu.event(external=True)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    assert count.value == 1


@pytest.mark.parametrize("captured", [{5}, {0, 1, 2}, set(range(31)), set(range(32))], ids=len)
def test_a_stream_that_is_captured_records_no_new_event(captured: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for torch's streams, which are numbered here; no GPU."""
    drawn, current, records = itertools.cycle(range(32)), [-1], list[int]()

    @contextmanager
    def use(stream: int) -> Iterator[None]:
        current[0], before = stream, current[0]
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(drawn))
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] in captured)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda **kwargs: SimpleNamespace(record=lambda: records.append(current[0]))
    )
    platform = object.__new__(CudaPlatform)
    platform.info = cast("Any", SimpleNamespace(device=torch.device("cuda", 0)))
    if len(captured) == 32:
        with pytest.raises(PlatformError, match="make external events before"):
            platform.event(external=True)
        return
    for _ in range(70):
        platform.event(external=True)
    assert len(records) == 70
    assert not captured & set(records)

"""One Ascend NPU as a specgraph platform, with torch.npu's own streams and events."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch

from specgraph.device import Capabilities, Event, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph.errors import CaptureError, PlatformError, UnsupportedError
from specgraph_npu import probe
from specgraph_npu.attention import HOST_OPS, make_attention
from specgraph_npu.graph import NpuGraph, NpuGraphPool
from specgraph_npu.task_groups import ExternalEvent, NpuTaskGroup


class NpuPlatform(Platform):
    """NPU `index` of this process. Opening and using it leaves the process's current device as it is."""

    graph_type = NpuGraph
    pool_type = NpuGraphPool

    def __init__(self, index: int) -> None:
        """Raises PlatformError if software is missing, if ASCEND_LAUNCH_BLOCKING is 1, or if the device can't be
        opened."""
        if reason := probe.missing():
            raise PlatformError(reason)
        self.torch_npu: Any = importlib.import_module("torch_npu")
        self.npu: Any = torch.npu  # type: ignore[attr-defined]
        counted = "graph_launches", "task_updates", "event_records", "event_synchronizes", "synchronizes"
        self.counters: dict[str, int] = dict.fromkeys(counted, 0)
        """Counts by name. `event_records` counts gates, ends of launches and events handed out; `synchronizes` counts
        host waits for the whole device."""
        self.event_type = _counted(self.npu.Event, self.counters)
        self.graphs: weakref.WeakSet[NpuGraph] = weakref.WeakSet()
        """The captured graphs. Their launches may wait at a gate."""
        self.retired: list[tuple[Event, Any, list[ExternalEvent]]] = []
        """For each graph that was dropped while a launch waited at a gate: the event at the end of its last launch,
        torch_npu's graph, and the gates. See `free_retired`."""
        self.broken = ""
        """The reason why this platform takes no more work. Empty as long as it works."""
        self.waits_for_values = probe.has_value_wait()
        self._index = index
        try:
            with self.on_device():
                name: str = self.npu.get_device_name(index)
                own = [self.npu.Stream(device=index) for _ in range(4)]
        except RuntimeError as error:
            raise PlatformError(f"NPU {index} can't be opened: {probe.reason_of(error)}") from error
        self.update_stream, self.capture_stream, self.gate_stream, self.copy_stream = own
        self._own_streams = {stream.npu_stream for stream in own}
        simulated, versions = probe.is_simulated(), probe.versions(self.torch_npu)
        kind = f"simulated runtime under torch_npu {self.torch_npu.__version__}, no NPU" if simulated else "NPU"
        name += " (simulated)" if simulated else ""
        super().__init__(PlatformInfo("npu", torch.device("npu", index), name, versions, kind, simulated))

    @cached_property
    def capabilities(self) -> Capabilities:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The capabilities, found at first use."""
        return probe.find_capabilities(self)

    def synchronize(self) -> None:
        """Wait for the device. Raises UpdateError if a launch waits at a gate without an update: the wait would never
        end."""
        self.require_working()
        for graph in list(self.graphs):
            graph.require_updates()
        self.counters["synchronizes"] += 1
        self.npu.synchronize(self._index)

    def memory(self) -> MemoryInfo:
        free, total = self.npu.mem_get_info(self._index)
        allocated, reserved = self.npu.memory_allocated(self._index), self.npu.memory_reserved(self._index)
        return MemoryInfo(allocated, reserved, total, free + reserved - allocated)

    def stream(self) -> Stream:
        """Return a stream, never one that the platform uses itself. torch_npu hands its streams out in turn, so two
        calls may return the same one."""
        while (stream := self.npu.Stream(device=self._index)).npu_stream in self._own_streams:
            pass
        return stream

    def current_stream(self) -> Stream:
        return self.npu.current_stream(self._index)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return self.npu.stream(stream)

    def on_device(self) -> AbstractContextManager[None]:
        """Make this NPU the process's current device within the block, for calls that take no device."""
        return self.npu.device(self._index)

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return an event. The host can't query, time or wait for an external event."""
        if not external:
            return self.event_type(enable_timing=timing)
        if not self.capabilities.external_events:
            raise UnsupportedError(f"no external events on this NPU: {self.capabilities.external_events.reason}")
        return ExternalEvent(self)

    def is_capturing(self) -> bool:
        with self.on_device():
            return bool(self.npu.is_current_stream_capturing())

    def is_waiting(self) -> bool:
        """Return whether a launch waits at a gate for its update. Waiting for the device would then never end."""
        return any(not group.is_updated for graph in list(self.graphs) for group in graph.groups)

    def free_retired(self) -> None:
        """Free the memory and streams of dropped graphs, unless a launch waits at a gate or a capture is open.

        In these cases a later call frees them. The garbage collector may drop a graph between a launch and its update,
        and torch_npu's `empty_cache` waits for the device.
        """
        if self.captures.graph is not None or self.broken or self.is_waiting():
            return
        retired, self.retired = self.retired, []
        with self.on_device():
            for done, graph, _gates in retired:
                done.synchronize()
                graph.reset()
        self.npu.empty_cache()

    def require_working(self) -> None:
        """Raises PlatformError if the platform is broken; see `broken`."""
        if self.broken:
            raise PlatformError(self.broken)

    def check_task_queue(self) -> None:
        """Set `broken` if torch_npu's task queue has ended. Called after a failed capture.

        An op that fails at its launch ends the queue, which then drops all later work without an error.
        """
        try:
            cell = torch.zeros(1, device=self.device)
            if all(cell.fill_(value).item() == value for value in (1, 2)):
                return
        except RuntimeError:
            pass  # the queue reports the op that ended it once, at the next call
        self.broken = (
            "an op of a failed capture ended torch_npu's task queue, which drops all work from then on: start a new "
            "process. TASK_QUEUE_ENABLE=0 makes such ops fail alone"
        )

    def task_group(self) -> AbstractContextManager[Any]:
        """See `Platform.task_group`. The block may issue kernels of one stream only: no copies, no events, no other
        stream."""
        if not isinstance(graph := self.captures.graph, NpuGraph):
            raise CaptureError("task_group() outside of a capture: there is no graph to put the group in")
        return NpuTaskGroup(graph).capture()

    def task_update(self, group: Any) -> AbstractContextManager[None]:
        """Run the block with the update stream as the current one."""
        if not isinstance(group, NpuTaskGroup):
            raise UnsupportedError(f"{group!r} is not a task group of this platform")
        return group.update()

    def attention_backends(self) -> Mapping[str, Any]:
        """Return the installed attention ops by name. The MLA ops take latent layers only (DeepSeek-V3), and the others
        take no latent layers."""
        return {name: partial(make_attention, name=name) for name, row in HOST_OPS.items() if row.available()}

    def counts(self) -> Mapping[str, int]:
        return dict(self.counters)

    def close(self) -> None:
        """Open the gates that launches wait at, so that the device can finish, and close the platform."""
        for graph in list(self.graphs):
            graph.release()
        super().close()


def _counted(event_type: Any, counters: dict[str, int]) -> Any:
    """Return the vendor's event type, with records and host waits counted."""

    class CountedEvent(event_type):
        def record(self, stream: Any = None) -> None:
            counters["event_records"] += 1
            super().record(stream)

        def synchronize(self) -> None:
            counters["event_synchronizes"] += 1
            super().synchronize()

    return CountedEvent

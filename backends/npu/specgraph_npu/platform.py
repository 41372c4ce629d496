"""The Platform on torch.npu."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import CaptureError, PlatformError, UnsupportedError
from specgraph.platforms import Capabilities, Event, Graph, GraphPool, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph_npu.attention import attention_factories
from specgraph_npu.capabilities import probe_capabilities
from specgraph_npu.counters import Counters, counted_event
from specgraph_npu.external_events import Gates
from specgraph_npu.graph import NpuGraph, NpuGraphPool
from specgraph_npu.probe import has_value_wait, import_torch_npu, is_simulated, missing, versions
from specgraph_npu.task_groups import NpuTaskGroup, capture_group, reason_of, update_group


class NpuPlatform(Platform):
    """One NPU. Holds streams of its own: to capture on, to update tasks on, and for new external events."""

    def __init__(self, index: int) -> None:
        """
        Raises:
            PlatformError: something is missing, ASCEND_LAUNCH_BLOCKING is set, or the device can't be opened.
        """
        if reason := missing():
            raise PlatformError(reason)
        self.torch_npu: Any = import_torch_npu()
        self.npu: Any = torch.npu  # type: ignore[attr-defined]
        self.counters = Counters()
        self.event_type = counted_event(self.npu.Event, self.counters)
        self.graphs: set[NpuGraph] = set()
        self.capturing: NpuGraph | None = None
        self._index, self._graph_count, self._is_closed = index, 0, False
        self._capabilities: Capabilities | None = None
        try:
            self.npu.set_device(index)
            self.update_stream: Any = self.npu.Stream()
            self.capture_stream: Any = self._stream_other_than(self.update_stream)
            self.scratch = torch.zeros(1, device=f"npu:{index}")
            name: str = self.npu.get_device_name(index)
        except RuntimeError as error:
            raise PlatformError(f"NPU {index} can't be opened: {reason_of(error)}") from error
        simulated = is_simulated()
        kind = f"simulated runtime under torch_npu {self.torch_npu.__version__}, no NPU" if simulated else "NPU"
        name += " (simulated)" if simulated else ""
        found = versions(self.torch_npu)
        self._info = PlatformInfo("npu", torch.device("npu", index), name, found, kind, simulated)
        self.gates = Gates(self, has_value_wait(), self._stream_other_than(self.update_stream, self.capture_stream))

    @property
    def info(self) -> PlatformInfo:
        """See `Platform.info`. `device_name` is the SoC."""
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        """See `Platform.capabilities`; probed at first use."""
        if self._capabilities is None:
            self._capabilities = probe_capabilities(self)
        return self._capabilities

    def synchronize(self) -> None:
        """See `Platform.synchronize`.

        Raises:
            UpdateError: a graph stands at a gate without an update: waiting would never end.
        """
        for graph in self.graphs:
            graph.require_updates()
        self.counters.synchronizes += 1
        self.npu.synchronize(self._index)

    def memory(self) -> MemoryInfo:
        """See `Platform.memory`."""
        _, total = self.npu.mem_get_info(self._index)
        return MemoryInfo(self.npu.memory_allocated(self._index), self.npu.memory_reserved(self._index), total)

    def stream(self) -> Stream:
        """See `Platform.stream`. torch_npu hands its streams out in turn, so two of many may be the same queue."""
        return self._stream_other_than(self.update_stream, self.capture_stream, self.gates.stream)

    def current_stream(self) -> Stream:
        """See `Platform.current_stream`."""
        return self.npu.current_stream(self._index)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See `Platform.use`."""
        return self.npu.stream(stream)

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """See `Platform.event`."""
        if not external:
            return self.event_type(enable_timing=timing)
        if not self.capabilities.external_events:
            raise UnsupportedError(f"no external events on this NPU: {self.capabilities.external_events.reason}")
        return self.gates.event()

    def graph_pool(self) -> GraphPool:
        """See `Platform.graph_pool`."""
        return NpuGraphPool(self)

    def graph(self, pool: GraphPool | None = None) -> Graph:
        """See `Platform.graph`."""
        if self._is_closed:
            raise PlatformError("this platform is closed: open it again")
        own = self.graph_pool() if pool is None else pool
        if not isinstance(own, NpuGraphPool):
            raise CaptureError(f"a pool of another platform: {own!r}")
        self._graph_count += 1
        return NpuGraph(self, own, self._graph_count)

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return bool(self.npu.is_current_stream_capturing())

    def task_group(self) -> AbstractContextManager[Any]:
        """See `Platform.task_group`."""
        if self.capturing is None:
            raise CaptureError("task_group() outside of a capture: there is no graph to put the group in")
        return capture_group(self, self.capturing)

    def task_update(self, group: Any) -> AbstractContextManager[None]:
        """See `Platform.task_update`. The block runs with the update stream as the current one."""
        if not isinstance(group, NpuTaskGroup):
            raise UnsupportedError(f"{group!r} is not a task group of this platform")
        return update_group(self, group)

    def weak_reference(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the memory: for what a captured op's update passes again.

        The graph owns the memory of what it allocated; a strong reference would keep the pool from reusing it.
        """
        return self.torch_npu._C._weak_ref_tensor(tensor)

    def attention_backends(self) -> Mapping[str, Any]:
        """See `Platform.attention_backends`."""
        return attention_factories()

    def counts(self) -> Mapping[str, int]:
        """See `Platform.counts`."""
        return asdict(self.counters)

    def close(self) -> None:
        """See `Platform.close`. A launch that stands at a gate is let go, so that the device can end."""
        if not self._is_closed:
            for graph in self.graphs:
                graph.release()
            self._is_closed = True

    def _stream_other_than(self, *taken: Any) -> Any:
        """A stream that is none of the given queues: torch_npu's pool hands the same ones out again and again."""
        streams = []
        for _ in range(len(taken) + 1):
            stream = self.npu.Stream(device=self._index)
            if all(stream.npu_stream != other.npu_stream for other in taken):
                return stream
            streams.append(stream)
        return streams[-1]

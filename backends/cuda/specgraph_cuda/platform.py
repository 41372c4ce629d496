"""One NVIDIA GPU as a specgraph platform, with torch.cuda's own streams and events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch

from specgraph.device import Capabilities, Event, MemoryInfo, Platform, PlatformInfo, Stream, TaskGroup, yes
from specgraph.errors import PlatformError, UnsupportedError
from specgraph_cuda import probe
from specgraph_cuda.graph import CudaGraph, CudaGraphPool, Launcher

_log = logging.getLogger(__name__)


class TaskUpdates(Protocol):
    """The task groups and updates of one GPU. An optional module implements them; `CudaPlatform` calls it."""

    count: int
    """The number of updates so far."""

    def group(self) -> AbstractContextManager[TaskGroup]:
        """See `Platform.task_group`."""
        ...

    def update(self, group: Any) -> AbstractContextManager[None]:
        """See `Platform.task_update`."""
        ...

    def batch(self) -> AbstractContextManager[object]:
        """See `Platform.batch_task_updates`."""
        ...

    def is_updating(self) -> bool:
        """Return whether this thread is capturing the ops of an update. Nothing may free device memory then."""
        ...


class CudaPlatform(Platform):
    """GPU `index` of this process."""

    graph_type = CudaGraph
    pool_type = CudaGraphPool

    def __init__(self, index: int) -> None:
        """Raises PlatformError if the GPU is too old."""
        properties = torch.cuda.get_device_properties(index)
        if properties.major < 7:
            capability = f"{properties.major}.{properties.minor}"
            raise PlatformError(f"{properties.name} has compute capability {capability}, 7.0 or newer is needed")
        device = torch.device("cuda", index)
        super().__init__(PlatformInfo("cuda", device, properties.name, probe.versions(device), "GPU"))
        self._streams: dict[int, torch.cuda.Stream] = {}
        """The streams that `current_stream` has returned, by the driver's handle."""
        self._total = int(properties.total_memory)
        self.put_off: list[Callable[[], object]] = []
        """The releases that `free` still has to call."""
        self.launcher: Launcher | None = probe.launcher()
        """None without cuda.bindings: then torch launches all graphs."""
        self.tasks: TaskUpdates | None = None
        """None if the module of task updates or cuda.bindings is missing, or the trial of task updates failed."""
        self._capabilities = probe.capabilities(self)
        triton = self._capabilities.notes["triton"]
        if triton:
            from specgraph_cuda.kernels import register_kernels

            notes = {**self._capabilities.notes, "tiles": yes(register_kernels(device))}
            self._capabilities = replace(self._capabilities, notes=notes)
        else:
            _log.warning("draft ops run as plain torch ops, several times slower: %s", triton.reason)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities found when the platform was opened."""
        return self._capabilities

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        """Return the memory of torch's allocator in this process. Only `free` counts other processes too."""
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + reserved - allocated
        return MemoryInfo(allocated, reserved, self._total, free)

    def stream(self) -> Stream:
        """Return a stream, never the platform's own for captures or copies. torch hands out the 32 streams of its pool
        in turn, so two calls may return the same one."""
        while self.is_own_stream(made := torch.cuda.Stream(self.device)):
            pass
        return made

    def current_stream(self) -> Stream:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)  # pyright: ignore[reportPrivateUsage]
        found = self._streams.get(raw)
        if found is None:  # torch.cuda.current_stream takes 3 us
            found = self._streams[raw] = torch.cuda.current_stream(self.device.index)
        return found

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        if not isinstance(stream, torch.cuda.Stream):
            raise PlatformError(f"{stream!r} is no stream of the 'cuda' platform: make one with platform.stream()")
        return torch.cuda.stream(stream)

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return an event. An external event can't be timed: its records are nodes of a graph.

        torch creates the CUDA event at its first record. A wait before that orders nothing, and a captured one adds no
        node to the graph. An external event is therefore recorded once here, on a stream that is not being captured.
        """
        if external and timing:
            raise UnsupportedError("an external event can't be timed on this platform: ask for one or the other")
        made: Any = torch.cuda.Event(enable_timing=timing, external=external)
        if external:
            with torch.cuda.stream(self._stream_outside_captures()):
                made.record()
        return made

    def _stream_outside_captures(self) -> torch.cuda.Stream:
        """Return a stream that is not being captured. torch hands out the 32 streams of its pool in turn, also captured
        ones."""
        for _ in range(32):
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(stream):
                if not self.is_capturing():
                    return stream
        raise PlatformError(
            "all 32 streams of torch's pool are being captured: make external events before the capture"
        )

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def free(self, *releases: Callable[[], object]) -> None:
        """Call the releases, which give memory or graphs back. While this thread captures, they wait for the next call.

        The garbage collector may drop an unclosed graph at any time. In a capture, whether the host engine's or a task
        update's, a release would invalidate the capture (cuGraphExecDestroy) or end the process (`MemPool`'s
        destructor).
        """
        self.put_off += releases
        if not self.is_capturing() and (self.tasks is None or not self.tasks.is_updating()):
            while self.put_off:
                self.put_off.pop(0)()

    def task_group(self) -> AbstractContextManager[TaskGroup]:
        return super().task_group() if self.tasks is None else self.tasks.group()

    def task_update(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Rewrite the group's parameters from the block, which is captured on a stream of its own."""
        return super().task_update(group) if self.tasks is None else self.tasks.update(group)

    def batch_task_updates(self) -> AbstractContextManager[object]:
        return super().batch_task_updates() if self.tasks is None else self.tasks.batch()

    def compile_ahead(self, bodies: Sequence[Callable[[], None]], progress: Callable[[int, int], None]) -> None:
        if not self._capabilities.notes["triton"]:
            return
        from specgraph_cuda.kernels import compile_ahead

        with torch.cuda.device(self.device):
            compile_ahead(bodies, progress)

    def counts(self) -> Mapping[str, int]:
        return {} if self.tasks is None else {"task_updates": self.tasks.count}

"""One NVIDIA GPU as a specgraph platform: torch.cuda's own streams, events and pools, handed through."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from specgraph.errors import PlatformError, UnsupportedError
from specgraph.platforms import Capabilities, Event, GraphPool, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph_cuda.capabilities import found_capabilities, versions
from specgraph_cuda.graph import CudaGraph, CudaGraphPool

OLDEST_COMPUTE_CAPABILITY = (7, 0)

_log = logging.getLogger(__name__)


class CudaPlatform(Platform):
    """GPU `index` of this process."""

    def __init__(self, index: int) -> None:
        """
        Raises:
            PlatformError: the GPU is too old, or does not run a first graph.
        """
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < OLDEST_COMPUTE_CAPABILITY:
            raise PlatformError(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}; "
                f"{'.'.join(map(str, OLDEST_COMPUTE_CAPABILITY))} or newer is needed"
            )
        device = torch.device("cuda", index)
        self._info = PlatformInfo("cuda", device, properties.name, versions(device), "GPU")
        self._total = int(properties.total_memory)
        self._capture_stream: torch.cuda.Stream | None = None
        self._is_closed = False
        self.capture_lock = threading.Lock()
        """Held during a capture: torch's generator and allocator know one capture of a device at a time."""
        self._capabilities = found_capabilities(device)
        if self._capabilities.triton:
            from specgraph_cuda.kernels import register_kernels

            register_kernels(device)
        else:
            _log.warning("draft ops run as plain torch ops, several times slower: %s", self._capabilities.triton.reason)

    @property
    def info(self) -> PlatformInfo:
        """See `Platform.info`."""
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        """See `Platform.capabilities`. Probed once, when the platform was opened."""
        return self._capabilities

    def synchronize(self) -> None:
        """See `Platform.synchronize`."""
        torch.cuda.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        """See `Platform.memory`. What torch's allocator holds; other processes are not counted."""
        return MemoryInfo(
            torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device), self._total
        )

    def stream(self) -> Stream:
        """See `Platform.stream`."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """See `Platform.current_stream`."""
        return torch.cuda.current_stream(self.device)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See `Platform.use`."""
        return torch.cuda.stream(_own(stream))

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """See `Platform.event`. External events can't be timed: their records are nodes of a graph."""
        if external and timing:
            raise UnsupportedError("an external event can't be timed on this platform: ask for one or the other")
        return torch.cuda.Event(enable_timing=timing, external=external)

    def graph_pool(self) -> CudaGraphPool:
        """See `Platform.graph_pool`."""
        self._refuse_closed()
        return CudaGraphPool(self)

    def graph(self, pool: GraphPool | None = None) -> CudaGraph:
        """See `Platform.graph`."""
        self._refuse_closed()
        if pool is not None and not isinstance(pool, CudaGraphPool):
            raise PlatformError(f"{pool!r} is no pool of the cuda platform")
        return CudaGraph(self, pool or CudaGraphPool(self))

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """See `Platform.close`. Graphs and tensors belong to those who made them."""
        self._capture_stream = None
        self._is_closed = True

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise PlatformError("this cuda platform is closed: open another one")

    def capture_stream(self, asked: Stream | None) -> torch.cuda.Stream:
        """Where a capture runs: as asked, else the current stream, which may not be the default one."""
        if asked is not None:
            return _own(asked)
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            return current
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)
        self._capture_stream.wait_stream(current)
        return self._capture_stream


def _own(stream: Any) -> torch.cuda.Stream:
    if not isinstance(stream, torch.cuda.Stream):
        raise PlatformError(f"{stream!r} is no stream of the cuda platform")
    return stream

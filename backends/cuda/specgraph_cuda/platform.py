"""One NVIDIA GPU as a specgraph platform: torch.cuda's own streams, events and pools, handed through."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from specgraph.errors import PlatformError, UnsupportedError
from specgraph.platforms import Capabilities, Event, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph_cuda.capabilities import found_capabilities, versions
from specgraph_cuda.graph import CudaGraph, CudaGraphPool

OLDEST_COMPUTE_CAPABILITY = (7, 0)

_log = logging.getLogger(__name__)


class CudaPlatform(Platform):
    """GPU `index` of this process."""

    graph_type = CudaGraph
    pool_type = CudaGraphPool

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
        super().__init__(PlatformInfo("cuda", device, properties.name, versions(device), "GPU"))
        self._total = int(properties.total_memory)
        self._capabilities = found_capabilities(self)
        if self._capabilities.triton:
            from specgraph_cuda.kernels import register_kernels

            register_kernels(device)
        else:
            _log.warning("draft ops run as plain torch ops, several times slower: %s", self._capabilities.triton.reason)

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

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


def _own(stream: Any) -> torch.cuda.Stream:
    if not isinstance(stream, torch.cuda.Stream):
        raise PlatformError(f"{stream!r} is no stream of the cuda platform")
    return stream

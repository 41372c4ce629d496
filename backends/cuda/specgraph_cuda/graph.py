"""CUDA graphs through torch's capture: the primitives of `specgraph.device.Graph`."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import CUDAGraph, graph_pool_handle

from specgraph.device import Graph, GraphPool, VendorMessage
from specgraph.errors import HostReadError

if TYPE_CHECKING:
    from specgraph_cuda.platform import CudaPlatform

Launcher = Callable[[int], Callable[[int], None]]
"""Returns the function that launches an executable graph, both given as the driver's handles: `driver.launcher`."""


class CudaGraphPool(GraphPool):
    """A private pool of torch's caching allocator."""

    platform: CudaPlatform

    def _new_handle(self) -> Any:
        return graph_pool_handle()

    def _release(self, handle: Any) -> None:
        """torch retires the pool with its last graph, and keeps its memory until the cache is emptied."""
        if self.platform.captures.graph is None:
            self.platform.free(torch.cuda.empty_cache)


class CudaGraph(Graph):
    """One CUDA graph."""

    messages = (
        *Graph.messages,
        VendorMessage(
            "copy between cpu and cuda tensors during cuda graph capture",
            HostReadError,
            "captured code copies between the device and pageable memory on the host: copy before the capture",
        ),
    )
    platform: CudaPlatform

    def __init__(self, platform: CudaPlatform, pool: CudaGraphPool, *, owns_pool: bool = False) -> None:
        super().__init__(platform, pool, owns_pool=owns_pool)
        self._graph: Any = None
        self._by_driver: Callable[[int], None] | None = None
        """Launches on a stream, given by its handle, once torch's first replay has shown that this is enough."""
        self._draws_numbers = False
        """True if that replay moved torch's random generator on."""

    def executable(self) -> int:
        """Return the cudaGraphExec_t of the captured graph. Owned by this object."""
        return int(self._graph.raw_cuda_graph_exec())

    def _begin(self, handle: Any) -> None:
        self._by_driver, self._draws_numbers = None, False
        self._graph = self._new_graph()
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def _new_graph(self) -> Any:
        """Return torch's graph of one capture."""
        return CUDAGraph()

    def _end(self) -> None:
        self._graph.capture_end()

    def _abandon(self, began: bool) -> None:
        """torch stops at the driver's error, with its pools and its generator still in capture.

        An empty, sound capture takes the place of the invalid one, and torch ends that.
        """
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")  # torch warns of empty graphs
            stream = torch.cuda.current_stream(self.platform.device).cuda_stream
            driver, ended = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(ended))
            if driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1) == 0:  # mode thread_local
                self._graph.capture_end()
        self._destroy()

    def _launch(self) -> None:
        index = self.platform.device.index
        if self._by_driver is not None and torch._C._cuda_getDevice() == index:  # pyright: ignore[reportPrivateUsage]
            self._by_driver(torch._C._cuda_getCurrentRawStream(index))  # pyright: ignore[reportPrivateUsage]
        elif self._by_driver is not None or self._draws_numbers or self.platform.launcher is None:
            self._graph.replay()
        else:
            self._launch_first(index, self.platform.launcher)

    def _launch_first(self, index: int, launcher: Launcher) -> None:
        """torch's replay moves its random generator on, where the graph draws numbers, and then calls the driver. All
        other graphs are launched without it from now on: it takes 2 us longer."""
        before = torch.cuda.get_rng_state(index)
        self._graph.replay()
        self._draws_numbers = not torch.equal(before, torch.cuda.get_rng_state(index))
        if not self._draws_numbers:
            self._by_driver = launcher(self.executable())

    def _destroy(self) -> None:
        graph, self._graph = self._graph, None  # its destructor tells torch's random generator
        self._by_driver = None
        if graph is not None:
            self.platform.free(graph.reset)

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
"""Executable graph -> the function that launches it on a stream. Both are the driver's handles; see
`driver.launcher`."""


class CudaGraphPool(GraphPool):
    """A private pool of torch's caching allocator."""

    platform: CudaPlatform

    def _new_handle(self) -> Any:
        return graph_pool_handle()

    def _release(self, handle: Any) -> None:
        """Empty torch's cache: torch retires a pool with its last graph, but keeps the memory until then."""
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
        """Launches the graph on a stream, given by its handle. None until torch's first replay has shown that the graph
        draws no random numbers."""
        self._draws_numbers = False
        """True if torch's first replay advanced torch's random generator."""

    def executable(self) -> int:
        """Return the cudaGraphExec_t of the captured graph. This object owns it."""
        return int(self._graph.raw_cuda_graph_exec())

    def _begin(self, handle: Any) -> None:
        self._by_driver, self._draws_numbers = None, False
        self._graph = self._new_graph()
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def _new_graph(self) -> Any:
        """Return the torch graph to capture into."""
        return CUDAGraph()

    def _end(self) -> None:
        self._graph.capture_end()

    def _abandon(self, began: bool) -> None:
        """End a failed capture so that torch takes its pools and its generator out of capture.

        torch's `capture_end` stops at the driver's error before it gets there. An empty, valid capture therefore takes
        the place of the failed one, and torch ends that.
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
        """Replay through torch, and see whether the graph draws random numbers.

        torch's replay advances its random generator if the graph draws numbers, and then calls the driver. A graph that
        draws none is launched by the driver alone from now on, which takes 2 us less.
        """
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

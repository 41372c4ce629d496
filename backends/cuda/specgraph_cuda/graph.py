"""CUDA graphs through torch's capture: the primitives of `specgraph.platforms.Graph`."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from typing import Any

import torch

from specgraph.errors import HostReadError
from specgraph.platforms import Graph, GraphPool, VendorMessage

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaGraphPool(GraphPool):
    """A private pool of torch's caching allocator."""

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def _release(self, handle: Any) -> None:
        """torch retires the pool with its last graph, and keeps its memory until the cache is emptied."""
        if self.platform.captures.graph is None:
            torch.cuda.empty_cache()


class CudaGraph(Graph):
    """One CUDA graph."""

    messages = (
        *Graph.messages,
        VendorMessage(
            "copy between cpu and cuda tensors during cuda graph capture",
            HostReadError,
            "captured code copies between the host and the device. Copy before the capture, into a persistent tensor",
        ),
    )
    _graph: torch.cuda.CUDAGraph

    def _begin(self, handle: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")

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
            if driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL) == 0:
                self._graph.capture_end()
        self._graph.reset()

    def _launch(self) -> None:
        self._graph.replay()

    def _destroy(self) -> None:
        self._graph.reset()

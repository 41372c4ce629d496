"""torch's tests of CUDA graphs, run against `Platform.graph()`: a pytest plugin.

PEERS_PLATFORM names the platform: cuda, or cpu (the default), where "cuda" in a test means the cpu platform. With
"torch" nothing is replaced: what fails then on a GPU is torch's own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from peers import torch_support as torch_support  # before torch's test support
from peers.cuda_on_cpu import CudaOnCpu
from peers.left_out import LEFT_OUT, LEFT_OUT_ON_CPU
from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems
from torch.testing._internal import common_cuda as common_cuda  # before TEST_CUDA is set
from torch.testing._internal import common_utils

from specgraph.device import open_platform

NAME = os.environ.get("PEERS_PLATFORM", "cpu")
platform = open_platform("cuda" if NAME == "torch" else NAME)


class CUDAGraph:
    """A `Platform.graph()` with the methods of torch's class; it captures on the current stream, as that does."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.graph = platform.graph()

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        if pool is not None:
            self.graph = platform.graph(pool)
        platform.capture_stream = platform.current_stream()
        self.block = self.graph.capture()
        self.block.__enter__()

    def capture_end(self) -> None:
        self.block.__exit__(None, None, None)

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()

    def pool(self) -> Any:
        return self.graph.pool


def pytest_configure() -> None:
    """Put the platform's graphs in the place of torch's; on cpu also its streams."""
    if NAME == "torch":
        return
    for module in (torch.cuda, torch.cuda.graphs):
        vars(module).update(CUDAGraph=CUDAGraph, graph_pool_handle=platform.graph_pool)
    if platform.device.type == "cpu":
        LEFT_OUT.update(LEFT_OUT_ON_CPU)
        torch.version.cuda = "13.0"
        vars(common_utils).update(TEST_CUDA=True, TEST_CUDA_GRAPH=True)
        properties = SimpleNamespace(total_memory=0)
        torch.cuda.__dict__.update(
            Stream=platform.stream,
            stream=platform.use,
            current_stream=platform.current_stream,
            synchronize=platform.synchronize,
            is_current_stream_capturing=platform.is_capturing,
            manual_seed=torch.manual_seed,
            empty_cache=lambda: None,
            get_device_properties=lambda index: properties,
            is_bf16_supported=lambda: False,
            get_allocator_backend=lambda: "native",
            _sleep=lambda cycles: None,
            # in CUDA's segments of 2 MiB; those of the cpu platform are half as large
            memory_stats=lambda: {"reserved_bytes.all.current": 2 * platform.memory().reserved},
        )
        torch._C._host_emptyCache = lambda: None
        torch.Tensor.record_stream = lambda self, stream: None
        CudaOnCpu().__enter__()

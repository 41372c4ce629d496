"""A captured graph that runs again while a value in device memory is not 0: the body of a WHILE node.

No supported torch captures into a WHILE node. So the work is captured into a graph of its own as ever, which becomes a
child of the node's body; after it a kernel hands the value to the node. The graph's random numbers, if it has any, are
those of the launch in each run: torch moves its generator on per launch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph.device import Platform
from specgraph_cuda.host_values import compiled
from specgraph_cuda.nodes import checked

_SOURCE = b"""
typedef __device_builtin__ unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);
extern "C" __global__ void hand_over(cudaGraphConditionalHandle node, const int* value) {
    cudaGraphSetConditional(node, *value != 0);
}
"""


class Loop:
    """An executable graph that is one WHILE node."""

    def __init__(self, body: int, repeat_while: Tensor) -> None:
        """
        Args:
            body: the cudaGraph_t of the captured work; it is copied.
            repeat_while: int32 [1] on the device, kept alive here.
        """
        self._value = repeat_while
        self._executable: Any = None
        with torch.cuda.device(repeat_while.device):
            context = checked(cu.cuCtxGetCurrent())
            graph = checked(cu.cuGraphCreate(0))
            try:
                # The handle is 1 at each launch, and what the kernel wrote after each run.
                handle = checked(cu.cuGraphConditionalHandleCreate(graph, context, 1, cu.CU_GRAPH_COND_ASSIGN_DEFAULT))
                node = cu.CUgraphNodeParams()
                node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
                node.conditional.handle = handle
                node.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
                node.conditional.size = 1
                node.conditional.ctx = context
                checked(cu.cuGraphAddNode(graph, None, None, 0, node))
                within = node.conditional.phGraph_out[0]
                child = checked(cu.cuGraphAddChildGraphNode(within, None, 0, cu.CUgraph(body)))
                self._add_kernel(within, child, int(handle))
                self._executable = checked(cu.cuGraphInstantiate(graph, 0))
            finally:
                cu.cuGraphDestroy(graph)

    def _add_kernel(self, graph: Any, after: Any, handle: int) -> None:
        """The kernel that hands the value to the node; the driver copies its parameters here."""
        values = ctypes.c_ulonglong(handle), ctypes.c_void_p(self._value.data_ptr())
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        kernel = cu.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = compiled(_SOURCE, b"hand_over", self._value.device)
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        kernel.kernelParams = ctypes.addressof(pointers)
        checked(cu.cuGraphAddKernelNode(graph, [after], 1, kernel))

    def launch(self) -> None:
        """Launch it on the current stream of its device, whichever device is the current one.

        A default stream's handle is 0 on every device: the driver takes it for that of the current device, where
        nothing orders the launch after the device's own work.
        """
        with torch.cuda.device(self._value.device):
            stream = torch.cuda.current_stream(self._value.device).cuda_stream
            checked(cu.cuGraphLaunch(self._executable, stream))

    def close(self) -> None:
        """Release the executable graph; a launch in flight goes on."""
        executable, self._executable = self._executable, None
        if executable is not None:
            cu.cuGraphExecDestroy(executable)


def work_repeats(platform: Platform) -> str | None:
    """A trial: work that counts down runs until 0 is reached, and at least once; what is wrong, or None."""
    left = torch.zeros(1, dtype=torch.int32, device=platform.device)
    runs = torch.zeros(1, dtype=torch.int64, device=platform.device)

    def body() -> None:
        runs.add_(1)
        left.sub_(1).clamp_(min=0)

    body()  # loads the kernels
    platform.synchronize()
    graph = platform.graph()
    try:
        with graph.capture(repeat_while=left):
            body()
        seen: list[int] = []
        for count in (3, 1, 0):
            runs.zero_()
            left.fill_(count)
            graph.replay()
            seen.append(int(runs.item()))
        return None if seen == [3, 1, 1] else f"work to be repeated 3, 1 and 0 times ran {seen} times"
    finally:
        graph.close()

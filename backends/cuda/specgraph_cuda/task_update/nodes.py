"""The nodes of CUDA graphs, through the driver: the nodes that a capture added, their kinds, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]

from specgraph.errors import CaptureError
from specgraph_cuda.driver import checked

_KERNEL = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
_MEMCPY = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
_MEMSET = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET


def last(stream: int) -> list[Any]:
    """Return the nodes that the next work on a capturing stream will depend on."""
    info = checked(cu.cuStreamGetCaptureInfo(stream))
    return list(info[3] or ())[: int(info[-1])]


def is_lost(stream: int) -> bool:
    """Return whether the capture on this stream failed for good."""
    return cu.cuStreamIsCapturing(stream)[1] == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED


def handles(found: Sequence[Any]) -> set[int]:
    """Return the driver's handles of nodes. Nodes are compared by these."""
    return {int(node) for node in found}


def between(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Return the nodes that follow `before`, up to and with `after`, in order.

    Raises:
        CaptureError: the nodes are no chain. Two captures could then put them in different orders.
    """
    start, found, now = handles(before), list[Any](), list(after)
    while handles(now) != start:
        if len(now) != 1:
            raise CaptureError("the ops of a task group must follow each other on one stream")
        found.append(now[0])
        answer = checked(cu.cuGraphNodeGetDependencies(now[0], 16))
        now = list(answer[0] or ())[: int(answer[-1])]
    return found[::-1]


def parameters(node: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the kind of a node, which an update must match, and its parameters, which an update sets.

    Raises:
        CaptureError: the driver can't rewrite nodes of this kind.
    """
    kind = checked(cu.cuGraphNodeGetType(node))
    if kind == _KERNEL:
        kernel = checked(cu.cuGraphKernelNodeGetParams(node))
        return ("kernel", int(kernel.func), int(kernel.kern)), kernel
    if kind == _MEMCPY:
        copy = checked(cu.cuGraphMemcpyNodeGetParams(node))
        return ("memcpy", int(copy.srcMemoryType), int(copy.dstMemoryType)), copy
    if kind == _MEMSET:
        fill = checked(cu.cuGraphMemsetNodeGetParams(node))
        return ("memset", int(fill.elementSize)), fill
    raise CaptureError(f"a task group holds a node of kind {kind}: only kernels, copies and fills can be updated")


def rewrite(executable: Any, node: Any, new: Any) -> None:
    """Set one node's parameters for all later launches. Raises RuntimeError if the driver refuses them."""
    if isinstance(new, cu.CUDA_KERNEL_NODE_PARAMS):
        checked(cu.cuGraphExecKernelNodeSetParams(executable, node, new))
    elif isinstance(new, cu.CUDA_MEMCPY3D):
        checked(cu.cuGraphExecMemcpyNodeSetParams(executable, node, new, checked(cu.cuCtxGetCurrent())))
    else:
        checked(cu.cuGraphExecMemsetNodeSetParams(executable, node, new, checked(cu.cuCtxGetCurrent())))

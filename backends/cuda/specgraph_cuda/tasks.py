"""Task update: the parameters of captured work, rewritten in the executable graph through the CUDA driver.

`task_group()` notes which nodes its block adds to the graph. `task_update(group)` captures its block again into a
temporary graph, checks that it holds the same nodes, and sets their parameters in the executable graph. The driver
applies them to launches to come; a launch that is queued or running keeps its own. Nothing waits on the host.

An op may tell which of its work holds the host values (`host_values`): an update then issues only that, and the rest of
the op is neither launched again nor rewritten.

Memory that the block allocates in an update comes from a pool that all graphs of one graph pool share: the rewritten
nodes use it in place of what was allocated during the capture. Such graphs must not run at the same time anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph.errors import CaptureError, UpdateError, first_line

if TYPE_CHECKING:
    from specgraph_cuda.graph import CudaGraph
    from specgraph_cuda.platform import CudaPlatform

_KERNEL = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
_MEMCPY = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
_MEMSET = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET


@dataclass(slots=True, eq=False)
class CudaTaskGroup:
    """The nodes that one block added to a graph, in order."""

    graph: CudaGraph
    number: int
    nodes: list[Any] = field(default_factory=list[Any])
    """What an update rewrites: all nodes of the block, or those of its ops that hold host values."""
    kinds: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    """What each node is; an update must issue the same."""
    executable: Any = None
    """The driver's handle of the executable graph, from the first update on."""
    kept: list[tuple[Tensor, Hashable]] = field(default_factory=list[tuple[Tensor, Hashable]])
    """Per op with host values: where they are stored, and what an update may not change."""
    is_updated: bool = False
    """An update was issued since the last launch."""

    def __str__(self) -> str:
        return f"task group {self.number} ({len(self.nodes)} nodes)"


@dataclass(slots=True)
class _Block:
    """The task group block that this thread is in."""

    group: CudaTaskGroup
    is_update: bool
    marked: list[Any] = field(default_factory=list[Any])
    num_ops: int = 0
    """Ops with host values issued so far."""


_block: ContextVar[_Block | None] = ContextVar("_block", default=None)


def host_values(
    allocate: Callable[[], Tensor], store: Callable[[Tensor], None], fixed: Hashable
) -> tuple[Tensor, bool]:
    """Called by an op: store its host values in device memory, as the work that task updates rewrite.

    Args:
        allocate: makes the memory; called once per captured op.
        store: issues the work that writes the values there.
        fixed: what the rest of the op's work depends on besides its tensors; an update must give the same.

    Returns:
        the memory, and whether the op must issue the rest of its work (not in an update).

    Raises:
        UpdateError: an update issues other ops, or changes `fixed`.
    """
    block = _block.get()
    if block is None:
        memory = allocate()
        store(memory)
        return memory, True
    group = block.group
    if not block.is_update:
        stream = torch.cuda.current_stream().cuda_stream
        memory = allocate()
        before = _last_nodes(stream)
        store(memory)
        block.marked += _between(before, _last_nodes(stream))
        group.kept.append((memory, fixed))
        return memory, True
    block.num_ops += 1
    if block.num_ops > len(group.kept) or group.kept[block.num_ops - 1][1] != fixed:
        raise UpdateError(
            f"{group}: op {block.num_ops - 1} of the update is not the captured one: issue it on the same tensors, for "
            "as many requests, and with equal rows per request where they were equal in the capture"
        )
    memory = group.kept[block.num_ops - 1][0]
    store(memory)
    return memory, False


class TaskUpdates:
    """Task groups and their updates on one GPU."""

    def __init__(self, platform: CudaPlatform) -> None:
        self.count = 0
        """Updates so far."""
        self._platform = platform
        self._stream = torch.cuda.Stream(platform.device)
        self._lock = threading.Lock()

    @contextmanager
    def group(self) -> Generator[CudaTaskGroup]:
        """See `Platform.task_group`."""
        captures = self._platform.captures
        if not captures.is_here:
            raise CaptureError("task_group() outside of a capture: there is no graph to put the group in")
        if (outer := _block.get()) is not None:
            raise CaptureError(f"{outer.group} is still open: task groups don't nest")
        graph: Any = captures.graph
        group = CudaTaskGroup(graph, len(graph.groups))
        stream = torch.cuda.current_stream(self._platform.device).cuda_stream
        before, block = _last_nodes(stream), _Block(group, is_update=False)
        token = _block.set(block)
        try:
            yield group
        finally:
            _block.reset(token)
        group.nodes = block.marked or _between(before, _last_nodes(stream))
        group.kinds = [_parameters(node)[0] for node in group.nodes]
        graph.groups.append(group)

    @contextmanager
    def update(self, group: Any) -> Generator[None]:
        """See `Platform.task_update`."""
        if not isinstance(group, CudaTaskGroup):
            raise UpdateError(f"{group!r} is no task group of the 'cuda' platform")
        graph = group.graph
        if group not in graph.groups:
            raise UpdateError(f"{group} belongs to a graph that was closed or reset: capture again")
        if self._platform.captures.is_here:
            raise CaptureError("task_update() is not allowed in a capture: do it before, or after")
        with self._lock:
            stream = self._stream.cuda_stream
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(graph.pool.update_memory):
                _check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
                token = _block.set(_Block(group, is_update=True))
                try:
                    yield
                    nodes = _between([], _last_nodes(stream))
                except BaseException as error:
                    status, temporary = cu.cuStreamEndCapture(stream)
                    if sound := status == cu.CUresult.CUDA_SUCCESS:
                        cu.cuGraphDestroy(temporary)
                    if isinstance(error, CaptureError) or (not sound and isinstance(error, RuntimeError)):
                        raise UpdateError(f"{group}: its ops can't be captured again: {first_line(error)}") from error
                    raise
                finally:
                    _block.reset(token)
                try:
                    temporary = _check(cu.cuStreamEndCapture(stream))
                except RuntimeError as error:
                    raise UpdateError(f"{group}: its ops can't be captured again: {first_line(error)}") from error
            try:
                self._rewrite(group, nodes)
            finally:
                cu.cuGraphDestroy(temporary)

    def _rewrite(self, group: CudaTaskGroup, issued: Sequence[Any]) -> None:
        """Set the parameters of all nodes of `group` to those of `issued`, or of none."""
        if len(issued) != len(group.nodes):
            raise UpdateError(f"{group}: the update issued {len(issued)} nodes: issue exactly the captured ops")
        try:
            new = [_parameters(node) for node in issued]
        except CaptureError as error:
            raise UpdateError(f"{group}: {error}") from error
        for place, (captured, (kind, _)) in enumerate(zip(group.kinds, new, strict=True)):
            if kind != captured:
                raise UpdateError(
                    f"{group}: node {place} of the update is a {kind[0]} other than the captured {captured[0]}: issue "
                    "exactly the captured ops, with values that need the same kernels"
                )
        if group.executable is None:
            group.executable = cu.CUgraphExec(group.graph.executable())
        for place, (node, (_, parameters)) in enumerate(zip(group.nodes, new, strict=True)):
            try:
                _set(group.executable, node, parameters)
            except RuntimeError as error:
                group.graph.broken = f"the driver refused to rewrite node {place} of {group}: {error}"
                raise UpdateError(f"{group.graph.broken}; reset() the graph and capture it again") from error
        group.is_updated = True
        self.count += 1


def _last_nodes(stream: int) -> list[Any]:
    """The nodes that the next work on a capturing stream will depend on."""
    info = _check(cu.cuStreamGetCaptureInfo(stream))
    return list(info[3] or ())[: int(info[-1])]


def _between(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """The nodes from after `before` to `after`, in order.

    Raises:
        CaptureError: they are not a chain, so that two captures could number them differently.
    """
    start, found, now = {int(node) for node in before}, list[Any](), list(after)
    while {int(node) for node in now} != start:
        if len(now) != 1:
            raise CaptureError("the ops of a task group must follow each other on one stream")
        found.append(now[0])
        answer = _check(cu.cuGraphNodeGetDependencies(now[0], 16))
        now = list(answer[0] or ())[: int(answer[-1])]
    return found[::-1]


def _parameters(node: Any) -> tuple[tuple[Any, ...], Any]:
    """What a node is, which an update must match, and its parameters, which an update sets.

    Raises:
        CaptureError: the driver can't rewrite nodes of this kind.
    """
    kind = _check(cu.cuGraphNodeGetType(node))
    if kind == _KERNEL:
        kernel = _check(cu.cuGraphKernelNodeGetParams(node))
        return ("kernel", int(kernel.func), int(kernel.kern)), kernel
    if kind == _MEMCPY:
        copy = _check(cu.cuGraphMemcpyNodeGetParams(node))
        return ("memcpy", int(copy.srcMemoryType), int(copy.dstMemoryType)), copy
    if kind == _MEMSET:
        fill = _check(cu.cuGraphMemsetNodeGetParams(node))
        return ("memset", int(fill.elementSize)), fill
    raise CaptureError(f"a task group holds a node of kind {kind}: only kernels, copies and fills can be updated")


def _set(executable: Any, node: Any, parameters: Any) -> None:
    """Set one node's parameters for the launches to come. Raises RuntimeError where the driver refuses."""
    if isinstance(parameters, cu.CUDA_KERNEL_NODE_PARAMS):
        _check(cu.cuGraphExecKernelNodeSetParams(executable, node, parameters))
    elif isinstance(parameters, cu.CUDA_MEMCPY3D):
        _check(cu.cuGraphExecMemcpyNodeSetParams(executable, node, parameters, _check(cu.cuCtxGetCurrent())))
    else:
        _check(cu.cuGraphExecMemsetNodeSetParams(executable, node, parameters, _check(cu.cuCtxGetCurrent())))


def _check(answer: tuple[Any, ...]) -> Any:
    """The results of a driver call: one, a tuple of several, or None. Raises RuntimeError with the driver's status."""
    status, *results = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return results[0] if len(results) == 1 else tuple(results) or None

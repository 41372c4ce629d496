"""Task update: the parameters of captured work, rewritten in the executable graph through the CUDA driver.

`task_group()` records the nodes that its block adds to the graph. `task_update(group)` captures the block's ops again
into a temporary graph, checks that they are the same nodes, and sets their parameters in the executable graph. The
driver uses the new parameters for later launches; a launch that is queued or running keeps its own. The host waits for
nothing. Updates of several groups can share one temporary graph (`batch`): all are checked before the first is made.

An op can put its host values into work of their own (`host_values`). An update then sets only the parameters of that
work, and captures nothing.

Memory that the block allocates in an update comes from a pool that all graphs of one graph pool share. The rewritten
nodes use it instead of the memory allocated in the capture. Such graphs must not run at the same time anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph.errors import CaptureError, UpdateError, first_line
from specgraph_cuda.driver import checked
from specgraph_cuda.task_update import nodes
from specgraph_cuda.task_update.host_values import StoredValues

if TYPE_CHECKING:
    from specgraph_cuda.platform import CudaPlatform
    from specgraph_cuda.task_update.graph import UpdatableGraph


@dataclass(slots=True, eq=False)
class CudaTaskGroup:
    """The work that one block added to a graph."""

    graph: UpdatableGraph
    number: int
    nodes: list[Any] = field(default_factory=list[Any])
    """The nodes to rewrite, in capture order: the nodes that store host values if the ops name them. Otherwise all."""
    kinds: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    """The kind of each node. An update that captures the block's ops again must issue nodes of the same kinds."""
    stored: list[tuple[StoredValues, Hashable]] = field(default_factory=list[tuple[StoredValues, Hashable]])
    """For each op with host values: their storage, and the values that an update may not change (`fixed` of
    `host_values`)."""
    executable: Any = None
    """The driver's handle of the executable graph. None before the first update."""
    is_updated: bool = False
    """True if an update was issued since the last launch."""

    def __str__(self) -> str:
        return f"task group {self.number} ({len(self.nodes)} nodes)"


@dataclass(slots=True)
class _Block:
    """The task group block that this thread is in."""

    group: CudaTaskGroup
    is_update: bool
    num_ops: int = 0
    """The ops with host values that the update has issued so far."""


@dataclass(slots=True)
class _Batch:
    """The updates that are captured into one temporary graph."""

    last: list[Any] = field(default_factory=list[Any])
    """The nodes that the next captured work will depend on."""
    updates: list[tuple[CudaTaskGroup, list[Any]]] = field(default_factory=list[tuple[CudaTaskGroup, list[Any]]])
    """Groups with the new parameters of their nodes."""
    has_failed: bool = False


_block: ContextVar[_Block | None] = ContextVar("_block", default=None)
_batch: ContextVar[_Batch | None] = ContextVar("_batch", default=None)


def host_values(values: Sequence[int], device: torch.device, fixed: Hashable) -> tuple[Tensor, bool]:
    """Put an op's host values into device memory, so that task updates rewrite these values alone. The op calls it.

    Args:
        values: 32-bit integers.
        device: the device that the op runs on.
        fixed: the values, besides its tensors, that the rest of the op's work depends on. An update must give equal
            ones.

    Returns:
        The memory, int32 [len(values)]; and False in an update, else True: the op must issue the rest of its work.

    Raises:
        UpdateError: an update issues other ops, or changes `fixed` or the number of values.
    """
    block = _block.get()
    if block is not None and block.is_update:
        group = block.group
        block.num_ops += 1
        captured = group.stored[block.num_ops - 1] if block.num_ops <= len(group.stored) else None
        if captured is None or captured[1] != fixed or captured[0].memory.numel() != len(values):
            raise UpdateError(
                f"{group}: op {block.num_ops - 1} of the update is not the captured one: issue it on the same tensors, "
                "for as many requests, and with equal rows per request where they were equal in the capture"
            )
        captured[0].fill(values)
        return captured[0].memory, False
    stored = StoredValues(torch.empty(len(values), dtype=torch.int32, device=device))
    stored.fill(values)
    if block is None:
        stored.issue()
    else:
        stream = torch.cuda.current_stream(device).cuda_stream
        before = nodes.last(stream)
        stored.issue()
        stored.nodes = nodes.between(before, nodes.last(stream))
        block.group.stored.append((stored, fixed))
    return stored.memory, True


class TaskUpdates:
    """Task groups and their updates on one GPU."""

    def __init__(self, platform: CudaPlatform) -> None:
        self.count = 0
        """The number of updates so far."""
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
        before, token = nodes.last(stream), _block.set(_Block(group, is_update=False))
        try:
            yield group
        finally:
            _block.reset(token)
        group.nodes = [node for stored, _ in group.stored for node in stored.nodes]
        if not group.stored:
            group.nodes = nodes.between(before, nodes.last(stream))
            group.kinds = [nodes.parameters(node)[0] for node in group.nodes]
        graph.groups.append(group)

    def update(self, group: Any) -> AbstractContextManager[None]:
        """See `Platform.task_update`."""
        if not isinstance(group, CudaTaskGroup):
            raise UpdateError(f"{group!r} is no task group of the 'cuda' platform")
        if group not in group.graph.groups:
            raise UpdateError(f"{group} belongs to a graph that was closed or reset: capture again")
        batch = _batch.get()
        return self._alone(group) if batch is None else self._issued(batch, group)

    @contextmanager
    def _alone(self, group: CudaTaskGroup) -> Generator[None]:
        with self.batch() as batch, self._issued(batch, group):
            yield

    @contextmanager
    def batch(self) -> Generator[_Batch]:
        """See `Platform.batch_task_updates`. All updates share one temporary graph. An inner batch joins the outer."""
        if (outer := _batch.get()) is not None:
            yield outer
            return
        if self._platform.captures.is_here:
            raise CaptureError("task_update() is not allowed in a capture: do it before, or after")
        stream = self._stream.cuda_stream
        with self._lock, torch.cuda.stream(self._stream):
            batch, temporary = _Batch(), None
            token = _batch.set(batch)  # before the capture begins and until it has ended: see `is_updating`
            try:
                checked(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
                try:
                    yield batch
                    if batch.has_failed:
                        raise UpdateError("one of several updates failed: none of them is made")
                    if nodes.handles(nodes.last(stream)) != nodes.handles(batch.last):
                        raise UpdateError("an update issued other work than the captured ops: nothing is rewritten")
                finally:
                    status, temporary = cu.cuStreamEndCapture(stream)
                if status != cu.CUresult.CUDA_SUCCESS:
                    raise UpdateError(f"the ops of an update can't be captured again: {status.name}")
                self._rewrite(batch)
            finally:
                _batch.reset(token)
                if temporary:
                    cu.cuGraphDestroy(temporary)
        if self._platform.put_off:
            self._platform.free()

    def is_updating(self) -> bool:
        """Return whether this thread is capturing the ops of an update. Nothing may free device memory then."""
        return _batch.get() is not None

    @contextmanager
    def _issued(self, batch: _Batch, group: CudaTaskGroup) -> Generator[None]:
        """Capture the block's ops, and add their parameters to `batch` if they fit `group`."""
        stream, block = self._stream.cuda_stream, _Block(group, is_update=True)
        token = _block.set(block)
        try:
            if group.stored:  # its ops allocate and issue nothing; the end of the batch checks that
                yield
                new = _fitting_values(group, block.num_ops)
            else:
                with torch.cuda.use_mem_pool(group.graph.pool.update_memory):
                    yield
                last = nodes.last(stream)
                new = _fitting_nodes(group, nodes.between(batch.last, last))
                batch.last = last
        except BaseException as error:
            batch.has_failed = True
            lost = isinstance(error, RuntimeError) and nodes.is_lost(stream)
            if lost or isinstance(error, CaptureError):
                raise UpdateError(f"{group}: its ops can't be captured again: {first_line(error)}") from error
            raise
        finally:
            _block.reset(token)
        batch.updates.append((group, new))

    def _rewrite(self, batch: _Batch) -> None:
        """Set all parameters in the executable graphs."""
        for group, parameters in batch.updates:
            if group.executable is None:
                group.executable = cu.CUgraphExec(group.graph.executable())
            for place, (node, new) in enumerate(zip(group.nodes, parameters, strict=True)):
                try:
                    nodes.rewrite(group.executable, node, new)
                except RuntimeError as error:
                    group.graph.broken = f"the driver refused to rewrite node {place} of {group}: {error}"
                    raise UpdateError(f"{group.graph.broken}; reset() the graph and capture it again") from error
            group.is_updated = True
            self.count += 1


def _fitting_values(group: CudaTaskGroup, num_ops: int) -> list[Any]:
    """Return the new parameters for the nodes of `group`, after an update that issued `num_ops` ops with host values.

    Raises:
        UpdateError: the update issued fewer ops than were captured.
    """
    if num_ops != len(group.stored):
        raise UpdateError(f"{group}: the update issued {num_ops} of its {len(group.stored)} ops: issue each of them")
    return [parameters for stored, _ in group.stored for parameters in stored.parameters()]


def _fitting_nodes(group: CudaTaskGroup, issued: Sequence[Any]) -> list[Any]:
    """Return the parameters of the issued nodes, one for each node of `group`.

    Raises:
        UpdateError: the issued nodes are not the captured ops.
        CaptureError: the driver can't rewrite nodes of this kind.
    """
    if len(issued) != len(group.nodes):
        raise UpdateError(f"{group}: the update issued {len(issued)} nodes: issue exactly the captured ops")
    new = [nodes.parameters(node) for node in issued]
    for place, (captured, (kind, _)) in enumerate(zip(group.kinds, new, strict=True)):
        if kind != captured:
            raise UpdateError(
                f"{group}: node {place} of the update is a {kind[0]} other than the captured {captured[0]}: issue "
                "exactly the captured ops, with values that need the same kernels"
            )
    return [parameters for _, parameters in new]

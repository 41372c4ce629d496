"""CUDA graphs with task groups, and the memory of their updates."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import CUDAGraph

from specgraph.errors import UpdateError
from specgraph_cuda.graph import CudaGraph, CudaGraphPool

if TYPE_CHECKING:
    from specgraph_cuda.platform import CudaPlatform
    from specgraph_cuda.task_update.tasks import CudaTaskGroup


class UpdatableGraphPool(CudaGraphPool):
    """A pool whose graphs share the memory of their updates."""

    @cached_property
    def update_memory(self) -> torch.cuda.MemPool:
        """The memory that the task updates of this pool's graphs allocate from; see tasks.py."""
        return torch.cuda.MemPool()

    def _release(self, handle: Any) -> None:
        if not self.num_graphs:
            memory = [self.__dict__.pop("update_memory", None)]
            self.platform.free(memory.clear)
        super()._release(handle)


class UpdatableGraph(CudaGraph):
    """A CUDA graph that is kept as captured, beside the executable one: updates name the captured nodes."""

    pool: UpdatableGraphPool

    def __init__(self, platform: CudaPlatform, pool: UpdatableGraphPool, *, owns_pool: bool = False) -> None:
        super().__init__(platform, pool, owns_pool=owns_pool)
        self.groups: list[CudaTaskGroup] = []
        self.broken = ""
        """The reason why the graph can't be replayed any more: the driver refused an update half-way. Else empty."""

    def _begin(self, handle: Any) -> None:
        self.groups, self.broken = [], ""
        super()._begin(handle)

    def _new_graph(self) -> Any:
        return CUDAGraph(keep_graph=True)

    def _end(self) -> None:
        super()._end()
        self._graph.instantiate()

    def _launch(self) -> None:
        if self.groups:
            self._use_updates()
        CudaGraph._launch(self)  # super() takes longer

    def _use_updates(self) -> None:
        """Use up one update of each group. Raises UpdateError if a group has had none, or the graph is broken."""
        if self.broken:
            raise UpdateError(f"{self.broken}; reset() the graph and capture it again")
        for group in self.groups:
            if not group.is_updated:
                raise UpdateError(f"{group} has had no update since the last replay: issue one task_update() for it")
        for group in self.groups:
            group.is_updated = False

    def _destroy(self) -> None:
        for group in self.groups:
            group.stored.clear()  # it is memory of the pool
        self.groups.clear()
        super()._destroy()

"""Graphs and pools of torch.accelerator: the primitives of `specgraph.device.Graph`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from specgraph.device import Graph, GraphPool

if TYPE_CHECKING:
    from specgraph_accelerator.platform import AcceleratorPlatform


class PoolHandle:
    """A memory pool of the device's allocator. Its id, `mempool`, is None until the first graph is captured in it:
    torch.accelerator creates pools in captures only."""

    def __init__(self) -> None:
        self.mempool: tuple[int, int] | None = None


class AcceleratorGraphPool(GraphPool):
    """A memory pool of several graphs. Later graphs name it by the id that the first graph's capture gave it."""

    def _new_handle(self) -> PoolHandle:
        return PoolHandle()

    def _release(self, handle: Any) -> None:
        if self.platform.captures.graph is None:  # emptying the cache would break another thread's capture
            torch.accelerator.empty_cache()


class AcceleratorGraph(Graph):
    """One torch.accelerator.Graph, `_raw`, per capture."""

    platform: AcceleratorPlatform
    _raw: Any = None

    def _begin(self, handle: Any) -> None:
        # The capture mode stays the default: XPU has no other mode and warns about one.
        self._raw = torch.accelerator.Graph(pool=handle.mempool)
        self._raw.capture_begin()

    def _end(self) -> None:
        self._raw.capture_end()
        self.pool_handle.mempool = self._raw.pool()

    def _abandon(self, began: bool) -> None:
        """End a failed capture. torch.accelerator has no call for that: if capture_end() raised and the stream is still
        capturing, a second capture_end() is the best attempt."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        self.pool.retire(self.pool_handle)  # some allocators refuse a further capture with this id
        with contextlib.suppress(Exception):
            if self.platform.is_capturing():
                raw.capture_end()
        with contextlib.suppress(Exception):
            raw.reset()

    def _launch(self) -> None:
        if torch.accelerator.current_device_index() == self.platform.index:
            return self._raw.replay()
        with torch.accelerator.device_index(self.platform.index):
            self._raw.replay()

    def _destroy(self) -> None:
        raw, self._raw = self._raw, None
        raw.reset()

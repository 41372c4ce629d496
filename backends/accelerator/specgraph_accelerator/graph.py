"""Graphs and pools of torch.accelerator: the primitives of `specgraph.device.Graph`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from specgraph.device import Graph, GraphPool

if TYPE_CHECKING:
    from specgraph_accelerator.platform import AcceleratorPlatform


class PoolHandle:
    """A memory pool of the device's allocator. It gets its id, `mempool`, with the first graph captured in it:
    torch.accelerator makes pools in captures only."""

    def __init__(self) -> None:
        self.mempool: tuple[int, int] | None = None


class AcceleratorGraphPool(GraphPool):
    """A memory pool that graphs share by the id of the first of them."""

    def _new_handle(self) -> PoolHandle:
        return PoolHandle()

    def _release(self, handle: Any) -> None:
        if self.platform.captures.graph is None:  # a release would break the capture of another thread
            torch.accelerator.empty_cache()


class AcceleratorGraph(Graph):
    """One torch.accelerator.Graph, `_raw`, per capture."""

    platform: AcceleratorPlatform
    _raw: Any = None

    def _begin(self, handle: Any) -> None:
        # The capture mode is the default one: XPU has no other, and warns.
        self._raw = torch.accelerator.Graph(pool=handle.mempool)
        self._raw.capture_begin()

    def _end(self) -> None:
        self._raw.capture_end()
        self.pool_handle.mempool = self._raw.pool()

    def _abandon(self, began: bool) -> None:
        """torch.accelerator has no call that only ends a capture: where capture_end() raised with the stream still in
        capture, a second one is the best there is."""
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

"""The memory pool that captured graphs allocate from, and the lock that allows one capture at a time."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from specgraph.errors import CaptureError

if TYPE_CHECKING:
    from specgraph.device.graph import Graph
    from specgraph.device.interface import Platform


class CaptureLock:
    """One capture at a time on one platform: allocators and generators know one capture per device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self.graph: Graph | None = None
        """The graph being captured, by whichever thread."""

    @property
    def is_here(self) -> bool:
        """Return whether the calling thread is the one that captures."""
        return self.graph is not None and self._thread == threading.get_ident()

    def acquire(self, graph: Graph) -> None:
        """Take the lock for `graph`; CaptureError where this thread or another one is capturing."""
        if self.is_here:
            raise CaptureError(f"nested capture: this thread is capturing {self.graph} already")
        if not self._lock.acquire(blocking=False):
            raise CaptureError("another thread is capturing on this device: capture one graph at a time")
        self._thread, self.graph = threading.get_ident(), graph

    def release(self) -> None:
        """End the capture."""
        self._thread, self.graph = 0, None
        self._lock.release()


class GraphPool:
    """Memory that captured graphs allocate from, at fixed addresses. Graphs of one pool may use the same memory.

    The vendor's pool has a handle. It is made for the first capture, counted per graph, and released with the last
    graph that was captured with it; a capture after that takes a new one.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.is_closed = False
        """True once `close()` was called. Used by: engine authors, suite."""
        self._handle: Any = None
        self._graphs: Counter[Any] = Counter()

    @property
    def num_graphs(self) -> int:
        """Graphs in this pool, including one that is being captured."""
        return self._graphs.total()

    @final
    def enter(self) -> Any:
        """Count one more graph; return the vendor's handle for its capture. CaptureError where the pool is closed."""
        if self.is_closed:
            raise CaptureError("the graph pool is closed: make a new one with platform.graph_pool()")
        if self._handle is None:
            self._handle = self._new_handle()
        self._graphs[self._handle] += 1
        return self._handle

    @final
    def leave(self, handle: Any) -> None:
        """Count one graph less that was captured with `handle`."""
        self._graphs[handle] -= 1
        if not self._graphs[handle]:
            del self._graphs[handle]
            self.retire(handle)
            self._release(handle)

    @final
    def retire(self, handle: Any) -> None:
        """No later capture gets `handle`: for a vendor whose pool takes none after a failed capture."""
        if self._handle == handle:
            self._handle = None

    @final
    def close(self) -> None:
        """Refuse new captures. The graphs in the pool stay valid, and keep its memory, until they are closed."""
        self.is_closed = True

    # ---- primitives ----------------------------------------------------------------------------------------------

    def _new_handle(self) -> Any:
        """Return a new pool of the vendor's; any hashable object but None."""
        return object()

    def _release(self, handle: Any) -> None:
        """Give the memory back: the last graph captured with `handle` is gone.

        May be called while another thread captures (`platform.captures.graph` is not None then); freeing memory would
        break that capture on most devices.
        """

"""The memory pool that captured graphs allocate from, and the lock that allows one capture at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, final

from specgraph.errors import CaptureError

if TYPE_CHECKING:
    from specgraph.device.graph import Graph
    from specgraph.device.interface import Platform


class _Capture(NamedTuple):
    graph: Graph
    thread: int
    key: object


class CaptureLock:
    """Allows one capture at a time on a platform: a device's allocator and random generator support only one.

    A single dictionary operation takes the lock, and another one releases it, so an interrupt never leaves it half
    taken.
    """

    def __init__(self) -> None:
        self.taken: dict[str, _Capture] = {}
        """The running capture. Empty if there is none."""

    @property
    def graph(self) -> Graph | None:
        """Return the graph that any thread is capturing. None if there is none."""
        capture = self.taken.get("capture")
        return None if capture is None else capture.graph

    @property
    def is_here(self) -> bool:
        """Return whether the calling thread is capturing."""
        capture = self.taken.get("capture")
        return capture is not None and capture.thread == threading.get_ident()

    def acquire(self, graph: Graph, key: object) -> None:
        """Begin the capture of `graph`. Only `release` with the same key ends it.

        Raises:
            CaptureError: this thread or another one is capturing.
        """
        asked = _Capture(graph, threading.get_ident(), key)
        capture = self.taken.setdefault("capture", asked)
        if capture is asked:
            return
        if capture.thread == asked.thread:
            raise CaptureError(f"nested capture: this thread is capturing {capture.graph} already")
        raise CaptureError("another thread is capturing on this device: capture one graph at a time")

    def release(self, key: object) -> bool:
        """End the capture that began with `key`. Return False if there is none."""
        capture = self.taken.get("capture")
        if capture is None or capture.key is not key:
            return False
        self.taken.clear()
        return True


class GraphPool:
    """Memory that captured graphs allocate from, at fixed addresses. Graphs of one pool may use the same memory.

    A handle stands for the vendor's pool. The first capture makes it, and it is released when the last graph that was
    captured with it leaves. A later capture makes a new handle.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.is_closed = False
        """True once `close()` was called. Used by: host engines, suite."""
        self._handle: Any = None
        self._handles: dict[int, Any] = {}
        """The handle of each graph, by the graph's `id()`, so that the pool keeps no graph alive."""

    @property
    def num_graphs(self) -> int:
        """Graphs in this pool, including one that is being captured."""
        return len(self._handles)

    @final
    def enter(self, graph: object) -> Any:
        """Add `graph` to the pool and return the vendor's handle for its capture.

        Raises:
            CaptureError: the pool is closed.
        """
        if self.is_closed:
            raise CaptureError("the graph pool is closed: make a new one with platform.graph_pool()")
        if self._handle is None:
            self._handle = self._new_handle()
        self._handles[id(graph)] = self._handle
        return self._handle

    @final
    def leave(self, graph: object) -> None:
        """Remove `graph` from the pool, if it is in it. The last graph of a handle releases the handle."""
        handle = self._handles.pop(id(graph), None)
        if handle is not None and handle not in self._handles.values():
            self.retire(handle)
            self._release(handle)

    @final
    def retire(self, handle: Any) -> None:
        """Give `handle` to no later capture. Needed if the vendor's pool takes no capture after a failed one."""
        if self._handle == handle:
            self._handle = None

    @final
    def close(self) -> None:
        """Refuse new captures. The graphs in the pool stay valid, and keep its memory, until they are closed."""
        self.is_closed = True

    # ---- primitives ----------------------------------------------------------------------------------------------

    def _new_handle(self) -> Any:
        """Make a pool of the vendor's and return its handle: any hashable object except None."""
        return object()

    def _release(self, handle: Any) -> None:
        """Release the memory of `handle`: the last graph that was captured with it is gone.

        Another thread may be capturing (`platform.captures.graph` is not None then). Freeing memory would break that
        capture on most devices.
        """

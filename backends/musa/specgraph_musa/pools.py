"""Memory pools of captured graphs, given back although MUSAGraph.reset() keeps them.

The caching allocator counts a pool's users: every capture adds one. reset() should take it off again and in 2.7.1 does
not, so the pool's memory would never come back. The binary module has the missing call. Which way holds for the
torch_musa at hand is tried once, when the platform opens.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Literal

import torch
from specgraph.errors import CaptureError

Release = Literal["by_reset", "by_own_call", "never"]

_log = logging.getLogger(__name__)

_TRIAL_BYTES = 32 << 20


class MusaGraphPool:
    """A pool of torch_musa's caching allocator. Its memory goes back when it and its graphs are closed.

    It has one handle of the allocator at a time, and each graph keeps the one it was captured with. After a failed
    capture, and once its last graph is gone, a handle takes no further captures: the next one gets a new handle.
    """

    def __init__(self, musa: Any, index: int, release: Release, captures: Any) -> None:
        """
        Args:
            musa: the module torch.musa.
            index: the device.
            release: what gives a closed graph's share back.
            captures: the lock that a capturing thread holds.
        """
        self._musa, self._index, self._release, self._captures = musa, index, release, captures
        self._handle: Any = None
        self._graphs: Counter[Any] = Counter()
        self.is_closed = False

    def join(self) -> Any:
        """The handle for one more capture.

        Raises:
            CaptureError: the pool is closed.
        """
        if self.is_closed:
            raise CaptureError("the graph pool is closed: make a new one with platform.graph_pool()")
        if self._handle is None:
            self._handle = self._musa.graph_pool_handle()
        self._graphs[self._handle] += 1
        return self._handle

    def leave(self, handle: Any, *, began: bool = True, was_reset: bool = True) -> None:
        """One graph is gone.

        Args:
            handle: what `join` gave for it.
            began: its capture got as far as taking its share of the pool.
            was_reset: it had a graph, which was reset; on some torch_musa that gives the share back.
        """
        if began and (self._release == "by_own_call" or (self._release == "by_reset" and not was_reset)):
            release_share(self._index, handle)
        self._graphs[handle] -= 1
        if self._graphs[handle] == 0:
            del self._graphs[handle]
            self.spoil(handle)
            if self._captures.acquire(blocking=False):  # freeing memory would break another thread's capture
                try:
                    if not self._musa.is_current_stream_capturing():
                        self._musa.empty_cache()
                finally:
                    self._captures.release()

    def spoil(self, handle: Any) -> None:
        """No further capture gets `handle`: the allocator, or one beside it, may believe a failed one goes on."""
        if self._handle == handle:
            self._handle = None

    def close(self) -> None:
        """Refuse new captures; the graphs in it stay until they are closed."""
        self.is_closed = True


def release_share(index: int, handle: Any) -> None:
    """Take one user off a pool."""
    _binary_module()._musa_releasePool(index, handle)


def end_recording(index: int, handle: Any) -> bool:
    """Tell the allocator that a failed capture no longer allocates from its pool; False if it knew."""
    try:
        _binary_module()._musa_endAllocateCurrentStreamToPool(index, handle)
    except RuntimeError:
        return False
    return True


def _binary_module() -> Any:
    import torch_musa._MUSAC as binary  # pyright: ignore[reportMissingImports]

    return binary


def find_release(musa: Any, index: int, stream: Any) -> Release:
    """Capture into a pool, let the graph go, and see what it takes for the memory to come back.

    Raises:
        RuntimeError: what the runtime says when it can't capture at all.
    """
    musa.empty_cache()
    before = musa.memory_reserved(index)
    handle = musa.graph_pool_handle()
    raw = musa.MUSAGraph()
    device = musa.current_stream(index).device
    source = torch.zeros((), dtype=torch.uint8, device=device)
    with musa.graph(raw, handle, stream, "thread_local"):
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=device).copy_(source)
    raw.reset()
    musa.empty_cache()
    if musa.memory_reserved(index) - before < _TRIAL_BYTES:
        return "by_reset"
    try:
        release_share(index, handle)
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.warning("graph pools can't be given back on this torch_musa (%s); closed graphs keep their memory", error)
        return "never"
    musa.empty_cache()
    return "by_own_call" if musa.memory_reserved(index) - before < _TRIAL_BYTES else "never"

"""One MUSA graph: torch.musa's capture underneath, with errors that leave the device usable."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specgraph.errors import CaptureError, HostReadError, SpecgraphError
from specgraph.platforms import Graph, Stream

from specgraph_musa.pools import MusaGraphPool, end_recording

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform

_log = logging.getLogger(__name__)

_FROZEN_AT_START = 1000
"""More than any interpreter freezes by itself: CPython 3.12 starts with a few hundred, others with none."""


class MusaGraph(Graph):
    """See `specgraph.platforms.Graph`. Made by `MusaPlatform.graph()`."""

    def __init__(self, platform: MusaPlatform, pool: MusaGraphPool, *, owns_pool: bool) -> None:
        self._platform, self._pool, self._owns_pool = platform, pool, owns_pool
        self._raw: Any = None
        self._handle: Any = None
        self._is_dumped = False
        self._is_closed = False

    @property
    def pool(self) -> MusaGraphPool:
        """See `Graph.pool`."""
        return self._pool

    @property
    def is_closed(self) -> bool:
        """See `Graph.is_closed`."""
        return self._is_closed

    @contextmanager
    def capture(self, *, stream: Stream | None = None, error_mode: str = "thread_local") -> Iterator[None]:
        """See `Graph.capture`. Without a stream: one of the platform's own, the same for all captures, so that graphs
        of one pool share memory (the allocator keeps free blocks by stream). The device is waited for first, which
        would break another thread's capture: one thread captures at a time."""
        self._refuse_unless_empty()
        if not self._platform.captures.acquire(blocking=False):
            raise CaptureError("another thread is capturing on this device: capture one graph at a time")
        try:
            with self._recorded(self._platform.stream_to_capture(stream), error_mode):
                yield
        finally:
            self._platform.captures.release()

    @contextmanager
    def _recorded(self, side: Any, error_mode: str) -> Iterator[None]:
        musa, index = self._platform.musa, self._platform.index
        self._refuse_over_budget(musa)
        raw = musa.MUSAGraph()
        handle = self._pool.join()
        with musa.device(index), musa.stream(side), _no_collection():  # the stream is put back where graph() fails to
            capturing = musa.graph(raw, handle, side, error_mode)
            try:
                capturing.__enter__()
            except Exception as error:
                self._abandon(raw, handle, side, began=False)
                raise _explained(error) from error
            try:
                yield
            except BaseException as error:
                if self._end(capturing) is None:  # the captured code's own error: the capture itself was sound
                    raw.reset()
                    self._pool.leave(handle)
                    if isinstance(error, torch.OutOfMemoryError):
                        raise _explained(error) from error
                    raise
                self._abandon(raw, handle, side, began=True)
                if isinstance(error, SpecgraphError) or not isinstance(error, Exception):
                    raise
                raise _explained(error) from error
            if (failure := self._end(capturing)) is not None:
                self._abandon(raw, handle, side, began=True)
                raise _explained(failure) from failure
        self._raw, self._handle = raw, handle

    def replay(self) -> None:
        """See `Graph.replay`."""
        if self._raw is None:
            state = "closed" if self._is_closed else "empty: capture it first"
            raise CaptureError(f"replay of a graph that is {state}")
        if self._platform.is_capturing():
            raise CaptureError("replay of a graph inside the capture of another: torch.musa records no child graphs")
        self._raw.replay()

    def reset(self) -> None:
        """See `Graph.reset`. A dumped graph's handle is left alive: destroying it again would crash."""
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if not self._is_dumped:
            raw.reset()
        self._pool.leave(self._handle, was_reset=not self._is_dumped)
        self._is_dumped = False

    def close(self) -> None:
        """See `Graph.close`."""
        if self._is_closed:
            return
        self.reset()
        self._is_closed = True
        if self._owns_pool:
            self._pool.close()

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and not sys.is_finalizing():
            self.reset()  # the vendor's destructor would keep the pool's memory

    def debug_dump(self, path: str | Path) -> None:
        """Write the captured graph as a DOT file. The graph still replays.

        torch_musa destroys the graph while dumping it and would do so again later, so its handle is kept until the
        process ends: each dumped graph counts as a live one for good.

        Raises:
            CaptureError: nothing is captured, or it was dumped before.
        """
        if self._raw is None:
            raise CaptureError("no captured graph to dump")
        if self._is_dumped:
            raise CaptureError("this graph was dumped before, and torch_musa destroys what it dumps: capture it again")
        _keep_for_good(self._raw)
        self._raw.enable_debug_mode()
        self._is_dumped = True
        self._raw.debug_dump(str(path))

    def _refuse_unless_empty(self) -> None:
        if self._is_closed:
            raise CaptureError("this graph is closed: make a new one with platform.graph()")
        if self._raw is not None:
            raise CaptureError("this graph holds a capture already: reset() it first")
        if self._platform.is_capturing():
            raise CaptureError("nested capture: the current stream is being captured already")

    def _refuse_over_budget(self, musa: Any) -> None:
        live, budget = len(musa.MUSAGraph.get_latest_instance()), self._platform.policy.max_live_graphs
        if live >= budget:
            gc.collect()  # some may be garbage
            live = len(musa.MUSAGraph.get_latest_instance())
        if live >= budget:
            raise CaptureError(
                f"this process holds {live} MUSA graphs, and the budget is {budget} (the runtime fails near 2048): "
                "name fewer capture sizes, use lowering 'step' instead of 'piecewise', or close drafters that are done"
            )

    @staticmethod
    def _end(capturing: Any) -> Exception | None:
        try:
            capturing.__exit__(None, None, None)
        except Exception as error:
            return error
        return None

    def _abandon(self, raw: Any, handle: Any, side: Any, *, began: bool) -> None:
        """After a failed capture: no recording to the pool, no share of it, no graph, and a sound generator."""
        self._pool.spoil(handle)
        _undo(raw, handle, self._pool, self._platform.index, began=began)
        if began:
            heal_generator(self._platform.musa, self._platform.index, self._platform.graph_pool(), side)


def _undo(raw: Any, handle: Any, pool: MusaGraphPool, index: int, *, began: bool) -> None:
    """Where the allocator was still recording, the capture had taken its share and reset() knows of nothing.

    Allocators keep a pointer to the graph that records, and not all of them can be told to drop it: it stays alive.
    """
    was_recording = end_recording(index, handle)
    raw.reset()
    if was_recording:
        _keep_for_good(raw)
    pool.leave(handle, began=began or was_recording, was_reset=not was_recording)


def heal_generator(musa: Any, index: int, pool: MusaGraphPool, side: Any) -> None:
    """The default generator believes that a failed capture goes on: a small sound one tells it otherwise.

    Where even that fails (no room for one more graph), the next capture that succeeds does it.
    """
    raw, handle = musa.MUSAGraph(), pool.join()
    capturing = musa.graph(raw, handle, side, "thread_local")
    began = False
    try:
        capturing.__enter__()
        began = True
        torch.zeros(1, device=side.device)
        capturing.__exit__(None, None, None)
    except Exception as error:
        _log.warning("after a failed capture, a further one failed too: %s", error)
    _undo(raw, handle, pool, index, began=began)


def _keep_for_good(raw: Any) -> None:
    """Never collected, so never destroyed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection could free another graph's memory, which a capture must not see.

    torch.musa.graph() also collects before each capture, which takes as long as the process has objects: a drafter's
    hundred graphs took half a minute. (Newer torch has dropped that from its own graph context.) Frozen, there is
    nothing to look through. Where the application froze its objects itself, that stays.
    """
    was_enabled, freeze = gc.isenabled(), gc.get_freeze_count() < _FROZEN_AT_START
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _explained(error: Exception) -> CaptureError:
    """The runtime's words for what a capture can't hold, in ours."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = first.lower()
    if "out of memory" in lowered:
        return CaptureError(f"out of memory during capture; capture smaller sizes, or give the KV cache less. {first}")
    if "out of resources" in lowered:
        return CaptureError(f"the runtime holds no more graphs: close some, or lower the budget. {first}")
    if "not permitted when stream is capturing" in lowered or "captureunsupported" in lowered:
        return HostReadError(
            f"captured code synchronises or reads a device value on the host ({first}). Keep the value on the device: "
            "no .item(), .tolist(), .cpu(), boolean test or data-dependent shape in a capture."
        )
    return CaptureError(f"capture failed: {first}")

"""Graphs and pools of torch.musa.

After a failed capture this module cleans up in torch_musa's place, and it frees memory that torch_musa's reset keeps.
Each case is a row of `policy.md`.
"""

from __future__ import annotations

import gc
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from specgraph.device import Graph, GraphPool
from specgraph.errors import CaptureError, first_line

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform

END_RECORDING = ("_musa_endAllocateToPool", "_musa_endAllocateCurrentStreamToPool")
"""The two names of one call: 2.11 has the first, 2.7.1 the second, 2.9.1.post1 both."""

_log = logging.getLogger(__name__)


class MusaGraphPool(GraphPool):
    """A private pool of torch_musa's caching allocator, which counts one share per capture."""

    platform: MusaPlatform

    def _new_handle(self) -> Any:
        return self.platform.musa.graph_pool_handle()

    def _release(self, handle: Any) -> None:
        if self.platform.captures.graph is None:  # during a capture, leave it to the next release
            self.platform.musa.empty_cache()


class MusaGraph(Graph):
    """One torch.musa.MUSAGraph, `_raw`, per capture."""

    platform: MusaPlatform
    _raw: Any = None
    _in_inference_mode = False  # True if torch refuses to capture and replay outside inference mode

    def _begin(self, handle: Any) -> None:
        self._raw = None
        musa = self.platform.musa
        check_budget(musa, self.platform.policy.max_live_graphs)
        musa.synchronize(self.platform.index)
        musa.empty_cache()
        self._raw = musa.MUSAGraph()
        self._in_inference_mode = begin(self._raw, handle)

    def _end(self) -> None:
        self._raw.capture_end()

    def _abandon(self, began: bool) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            self.pool.retire(self.pool_handle)  # some allocators refuse a further capture with this handle
            drop(raw, self.pool_handle, self.platform, began=began)
            heal_generator(self.platform)

    def _launch(self) -> None:
        if not self._in_inference_mode or torch.is_inference_mode_enabled():
            return self._raw.replay()  # a context manager would slow down every launch
        with torch.inference_mode():
            self._raw.replay()

    def _destroy(self) -> None:
        raw, self._raw = self._raw, None
        raw.reset()
        if self.platform.release == "by_own_call":
            release_share(self.platform.index, self.pool_handle)


def check_budget(musa: Any, budget: int) -> None:
    """Raise CaptureError if this process holds `budget` executable graphs, other libraries' included.

    There is no budget while torchada rotates executables: beyond a number of its own it drops the oldest one, and makes
    it again at its next replay.
    """
    if is_rotating() or len(musa.MUSAGraph.get_latest_instance()) < budget:
        return
    gc.collect()  # graphs that only a reference cycle keeps alive
    if (live := sum(map(holds_capture, musa.MUSAGraph.get_latest_instance()))) >= budget:
        raise CaptureError(
            f"this process holds {live} MUSA graphs, and the budget is {budget} (the runtime fails near 2048): "
            "name fewer capture sizes, use decode='step' instead of 'piecewise', or close drafters that are done"
        )


def is_rotating() -> bool:
    """Return whether torchada keeps the number of executable graphs of this process below the runtime's limit."""
    rotation = sys.modules.get("torchada._graph_rotation")
    stats = None if rotation is None else rotation.stats()  # None also if rotation is switched off
    return stats is not None and not stats["aux_failed"]


def holds_capture(raw: Any) -> bool:
    """Return whether a MUSAGraph has accepted a capture: only then it names its pool, and newer releases' reset() gives
    the pool's share back."""
    try:
        raw.pool()
    except RuntimeError:
        return False
    return True


def begin(raw: Any, handle: Any) -> bool:
    """Begin a capture on the current stream. Return whether it needed inference mode."""
    try:
        with torch.inference_mode(False):
            raw.capture_begin(handle, capture_error_mode="thread_local")
        return False
    except RuntimeError as error:
        if "inference tensor" not in str(error):
            raise
    with torch.inference_mode():
        raw.capture_begin(handle, capture_error_mode="thread_local")
    return True


def drop(raw: Any, handle: Any, platform: MusaPlatform, *, began: bool) -> None:
    """Release a MUSAGraph whose capture failed, and its share of the pool `handle`.

    The allocator's recording ends after the capture has: with the allocator's option graph_capture_record_stream_reuse
    the call raises while a stream is being captured, as it does if nothing is recorded.
    """
    # If the allocator still records, capture_begin() took a share that reset() does not know of.
    has_share = end_recording(platform.index, handle) or began
    if platform.release == "by_reset" and holds_capture(raw):
        has_share = False
    raw.reset()
    if has_share and platform.release != "never":
        release_share(platform.index, handle)


def heal_generator(platform: MusaPlatform) -> None:
    """Capture one small graph on the current stream and drop it.

    After a failed capture the default generator behaves as in a capture until another capture ends. If this one fails
    too, the next successful capture ends that state.
    """
    raw, handle = platform.musa.MUSAGraph(), platform.musa.graph_pool_handle()
    began = False
    try:
        begin(raw, handle)
        began = True
        torch.zeros(1, device=platform.device)
        raw.capture_end()
    except Exception as error:
        _log.warning("after a failed capture, a further one failed too: %s", first_line(error))
    drop(raw, handle, platform, began=began)


def release_share(index: int, handle: Any) -> None:
    """Give one share of the pool `handle` back.

    Raises AttributeError if torch_musa has no such call, and RuntimeError if the pool has no share left.
    """
    import_module("torch_musa._MUSAC")._musa_releasePool(index, handle)


def end_recording(index: int, handle: Any) -> bool:
    """End the allocator's recording to the pool `handle`. Return whether it was recording."""
    binary = import_module("torch_musa._MUSAC")
    try:
        getattr(binary, next(n for n in END_RECORDING if hasattr(binary, n)))(index, handle)
    except RuntimeError:
        return False
    return True

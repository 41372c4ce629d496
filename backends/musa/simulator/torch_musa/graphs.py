"""MUSAGraph, with the limits and defects of 2.7.1."""

import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_musa import runtime, simulated
from torch_musa.handles import current_stream, default_stream

__all__ = ["MUSAGraph", "graph_pool_handle", "is_current_stream_capturing"]


@dataclass
class Captures:
    """The runtime's state: the running capture, and the number of instantiated graphs."""

    current: "MUSAGraph | None" = None
    instantiated: int = 0
    in_pool: Counter = field(default_factory=Counter)
    """Pool -> number of live graphs."""


class Generator:
    """The default generator's state for graphs, after MUSAGeneratorImpl.cpp.

    The first registered graph creates two tensors, and each capture and replay fills them in place. A flag says whether
    a capture is running.
    """

    def __init__(self):
        self.graphs, self.tensors, self.is_capturing = weakref.WeakSet(), None, False

    def capture_prologue(self, graph):
        if self.tensors is None or not self.graphs:
            self.tensors = torch.empty(2, dtype=torch.int64)
        self.graphs.add(graph)
        self.is_capturing = True
        self.tensors.fill_(0)

    def replay_prologue(self):
        with _disable_current_modes():  # it is the runtime's memory, which two replays may write at the same time
            self.tensors.fill_(0)
        if self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly. (simulated)")


captures = Captures()
generator = Generator()
_instances = weakref.WeakSet()


def is_current_stream_capturing():
    return runtime.platform.is_capturing()


def graph_pool_handle():
    return runtime.new_pool_handle()


class MUSAGraph:
    def __new__(cls):
        instance = super().__new__(cls)
        _instances.add(instance)
        return instance

    def __init__(self):
        self._capture = None
        self._has_exec = False
        self._replays = 0
        self._rng = None
        self.collectives = set()

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"MUSA error (simulated): unknown capture error mode {capture_error_mode}")
        if self._has_exec:
            raise RuntimeError("MUSA error (simulated): this MUSAGraph holds a captured graph already")
        generator.capture_prologue(self)
        if current_stream() == default_stream():
            raise RuntimeError("MUSA error (simulated): the default stream can't be captured")
        self._stream = current_stream()
        self._rng = torch.get_rng_state() if simulated.defects.random_baked else None
        self._capture = runtime.Capture()
        self.collectives.clear()
        self._capture.begin(pool)
        captures.current = self

    def capture_end(self):
        captures.current = None
        if self._capture is None or current_stream() != self._stream:
            raise RuntimeError("MUSA error (simulated): a capture ends on the stream it began on")
        self._capture.end()
        limit = simulated.defects.max_live_graphs
        if limit is not None and captures.instantiated >= limit:
            self._capture.destroy()
            raise RuntimeError("MUSA error (simulated): out of resources at graph instantiation")
        captures.instantiated += 1
        generator.is_capturing = False
        self._has_exec = True
        self._replays = 0
        self._is_further = captures.in_pool[self.pool()] > 0
        captures.in_pool[self.pool()] += 1

    def replay(self):
        if not self._has_exec:
            raise RuntimeError("MUSA error (simulated): replay before a successful capture")
        generator.replay_prologue()
        self._replays += 1
        defects = simulated.defects
        if defects.replays_once and self._replays > 1:
            return
        if defects.pool_overlaps and self._is_further:
            return
        if defects.loop_stops_short and self._capture.num_nodes >= 64:
            return
        if defects.random_baked and self._rng is not None:
            torch.set_rng_state(self._rng)
        self._capture.replay()

    def reset(self):
        if not self._has_exec:
            return
        self._has_exec = False
        captures.instantiated -= 1
        captures.in_pool[self._capture.handle] -= 1
        self._capture.destroy()

    def pool(self):
        if not self._has_exec:
            raise RuntimeError("MUSA error (simulated): pool() before a successful capture")
        return self._capture.handle

    @classmethod
    def get_latest_instance(cls):
        return list(_instances)

    def __del__(self):
        if getattr(self, "_has_exec", False):
            self.reset()
        elif getattr(getattr(self, "_capture", None), "is_pointed_to", False):
            simulated.corrupt("a graph is destroyed to which the host allocator still has a pointer")

"""MUSAGraph, after csrc/aten/musa/MUSAGraph.cpp of 2.7.1 (tag v2.7.1, 0bc05bf) and of a newer release.

The newer file has no commit in public; it has the functions of torch 2.11. Only what the two do otherwise depends on
`simulated.machine.release`. What 2.11 adds (keep_graph, instantiate, raw handles) is not here: specgraph calls none.
"""

import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_musa import runtime, simulated
from torch_musa.handles import current_stream, default_stream
from torch_musa.runtime import error, errors, graph_pool_handle

__all__ = ["MUSAGraph", "graph_pool_handle", "is_current_stream_capturing"]


class Generator:
    """The default generator's state for graphs (2.7.1: csrc/aten/musa/MUSAGeneratorImpl.cpp:137-155, 201-206, 221-230).

    The first registered graph creates two tensors, and each capture and replay fills them in place. A flag says whether
    a capture is running; it is set before the fill, which may fail.
    """

    def __init__(self):
        self.graphs, self.tensors, self.is_capturing = weakref.WeakSet(), None, False

    def capture_prologue(self, graph):
        if self.tensors is None or not self.graphs:
            self.tensors = torch.empty(2, dtype=torch.int64)
        self.graphs.add(graph)
        self.is_capturing = True
        self._fill()

    def _fill(self):
        with _disable_current_modes():  # it is the runtime's memory, which two streams may write at the same time
            self.tensors.fill_(0)

    def replay_prologue(self):
        self._fill()
        if self.is_capturing:
            raise error("Offset increment outside graph capture encountered unexpectedly.")


generator = Generator()
executables = weakref.WeakSet()
"""The graphs that hold an executable, which is what the runtime counts."""
_instances = weakref.WeakSet()


def is_current_stream_capturing():
    return runtime.platform.is_capturing()


class MUSAGraph:
    def __new__(cls):
        """All instances are known (2.7.1: musa_graph/graphs.py:51-57)."""
        instance = super().__new__(cls)
        _instances.add(instance)
        return instance

    def __init__(self):
        self._graph = self._context = None
        self._is_accepted = False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        """The order of steps is that of 2.7.1:86-172 (new: 65-138), the modes those of csrc/core/Graph.cpp:26-37."""
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise error(f"unknown capture error mode {capture_error_mode}")
        if self in executables:
            raise error("this MUSAGraph instance already owns a captured graph")
        generator.capture_prologue(self)
        if current_stream() == default_stream():
            raise error("MUSA graphs must be captured on a non-default stream")
        self._stream, self._handle = current_stream(), pool or graph_pool_handle()
        runtime.begin_allocate(self._handle)
        self._graph = runtime.platform.graph(runtime.pools[self._handle].memory)
        runtime.platform.capture_stream = runtime.platform.current_stream()
        self._context = self._graph.capture()
        with errors():
            self._context.__enter__()
        runtime.capturing = self

    def capture_end(self):
        """A capture that failed leaves the allocator's recording. 2.7.1 (:174-215) ends the generator's capture after
        the instantiation, the newer file before it; only then the graph is accepted."""
        runtime.capturing = None
        if self._context is None or current_stream() != self._stream:
            raise error("capture must end on the same stream it began on")
        context, self._context = self._context, None
        with errors():
            context.__exit__(None, None, None)
        runtime.end_allocate(self._handle)
        if simulated.machine.captures_nothing:
            raise error("Invalid capture.")
        if simulated.machine.release == "2.7.1":
            self._instantiate()
        generator.is_capturing, self._is_accepted = False, True
        if simulated.machine.release != "2.7.1":
            self._instantiate()

    def _instantiate(self):
        """Over the runtime's limit the call fails as an illegal memory access (torchada 0.1.103)."""
        limit = simulated.machine.max_live_graphs
        if limit is not None and len(executables) >= limit:
            raise error("an illegal memory access was encountered")
        executables.add(self)

    def replay(self):
        """Fill the generator's tensors, and launch on the current stream (2.7.1:228-244, new: 219-238)."""
        if self not in executables:
            raise error("called MUSAGraph::replay without a preceding successful capture")
        generator.replay_prologue()
        with errors():
            self._graph.replay()

    def reset(self):
        """2.7.1 never gives the pool's share back (:287-290); the newer file does if the graph accepted a capture."""
        if self._is_accepted and simulated.machine.release != "2.7.1":
            runtime.release_pool(self._handle)
        self._is_accepted = False
        executables.discard(self)
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def pool(self):
        """The pool is known after a capture was accepted (2.7.1:305-310: after its instantiation)."""
        if not self._is_accepted:
            raise error("called MUSAGraph::pool() without a preceding successful capture")
        return self._handle

    @classmethod
    def get_latest_instance(cls):
        return list(_instances)

    def __del__(self):
        """The destructor resets (2.7.1 and newer)."""
        if hasattr(self, "_is_accepted"):
            self.reset()

"""The simulator runs on specgraph's recorded graphs on the CPU: one device, whose tensors are CPU tensors."""

import os
from contextlib import contextmanager

from specgraph.cpu import CpuPlatform
from specgraph.errors import CaptureError, PlatformError

from torch_musa import simulated

VARIABLE = "SPECGRAPH_MUSA_SIMULATOR"
if os.environ.get(VARIABLE) != "cpu":
    raise ImportError(
        f"this torch_musa is specgraph's simulator, test equipment that drives no MUSA device, and {VARIABLE} is not "
        "cpu: set it to run tests on it, or take it off the path to use the real torch_musa"
    )

platform = CpuPlatform()


@contextmanager
def errors():
    """Turn the recorder's errors into RuntimeError, which calls of the real runtime raise."""
    try:
        yield
    except (CaptureError, PlatformError) as error:
        raise RuntimeError(f"MUSA error (simulated): {error}") from error


class _Pool:
    """A private pool of the caching allocator. Emptying the cache frees it if its count of uses is 0."""

    def __init__(self):
        self.memory = platform.graph_pool()
        self.memory.enter(self)  # otherwise the recorder's pool would free itself at a reset
        self.uses = 1

    def free(self):
        self.memory.leave(self)
        self.memory.close()


_pools = {}
_recording_to = set()
_host_recording_to = set()
"""The pools that host memory is recorded to. Newer torch does so too (seen with torch.cuda 2.11), and only a successful
capture ends it."""
_handles = 0


def new_pool_handle():
    global _handles
    _handles += 1
    return (0, _handles)


def begin_allocate(handle):
    if handle in _pools:
        if _pools[handle].uses <= 0:
            raise RuntimeError("MUSA error (simulated): a capture into a pool that was released")
        _pools[handle].uses += 1
    else:
        _pools[handle] = _Pool()
    if handle in _recording_to:
        raise RuntimeError("MUSA error (simulated): the pool is being recorded to already")
    _recording_to.add(handle)


def end_allocate(handle):
    if handle not in _recording_to:
        raise RuntimeError("MUSA error (simulated): the pool is not being recorded to")
    _recording_to.remove(handle)


def release_pool(handle):
    pool = _pools.get(handle)
    if pool is None or pool.uses <= 0:
        raise RuntimeError("MUSA error (simulated): the pool was released before")
    pool.uses -= 1


def empty_cache():
    for handle, pool in list(_pools.items()):
        if pool.uses == 0:
            pool.free()
            del _pools[handle]


class Capture:
    """A recorded graph and the pool that it was captured into."""

    def __init__(self):
        self._graph = self._context = None

    @property
    def is_pointed_to(self):
        """True if an allocator still records to the pool for this capture."""
        return simulated.machine.release != "2.7.1" and self._is_recorded

    _is_recorded = False

    def begin(self, handle):
        self.handle = handle or new_pool_handle()
        begin_allocate(self.handle)
        self._graph = platform.graph(_pools[self.handle].memory)
        if simulated.machine.release != "2.7.1" and self.handle in _host_recording_to:
            raise RuntimeError("MUSA error (simulated): the host allocator is already recording to the pool")
        _host_recording_to.add(self.handle)
        self._is_recorded = True
        platform.capture_stream = platform.current_stream()
        self._context = self._graph.capture()
        with errors():
            self._context.__enter__()

    def end(self):
        context, self._context = self._context, None
        with errors():
            context.__exit__(None, None, None)
        end_allocate(self.handle)
        _host_recording_to.discard(self.handle)
        self._is_recorded = False

    @property
    def num_nodes(self):
        return self._graph.num_tasks

    def replay(self):
        with errors():
            self._graph.replay()

    def destroy(self):
        """Destroy the graph. The pool's count of uses goes down only if the defect `reset_keeps_pool` is off."""
        self._graph.close()
        self._graph = None
        if not simulated.defects.reset_keeps_pool:
            release_pool(self.handle)

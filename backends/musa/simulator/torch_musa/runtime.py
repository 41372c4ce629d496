"""The simulator runs on specgraph's recorded graphs on the CPU: one device, whose tensors are CPU tensors.

The pools below are those of csrc/core/MUSACachingAllocator.cpp, at e205050 (2.11.0.post2).
"""

import os
from contextlib import contextmanager
from itertools import count

from specgraph.cpu import CpuPlatform
from specgraph.errors import CaptureError, PlatformError

VARIABLE = "SPECGRAPH_MUSA_SIMULATOR"
if os.environ.get(VARIABLE) != "cpu":
    raise ImportError(
        f"this torch_musa is specgraph's simulator, test equipment that drives no MUSA device, and {VARIABLE} is not "
        "cpu: set it to run tests on it, or take it off the path to use the real torch_musa"
    )

from torch_musa import simulated  # noqa: E402

platform = CpuPlatform()


def error(text):
    """Return the error of a call that fails."""
    return RuntimeError(f"MUSA error (simulated): {text}")


@contextmanager
def errors():
    """Turn the recorder's errors into RuntimeError, which calls of the real runtime raise."""
    try:
        yield
    except (CaptureError, PlatformError) as failure:
        raise error(failure) from failure


class Pool:
    """A private pool of the caching allocator. Emptying the cache frees it if its count of uses is 0."""

    def __init__(self):
        self.memory = platform.graph_pool()
        self.memory.enter(self)  # otherwise the recorder's pool would free itself at a reset
        self.uses = 1

    def free(self):
        self.memory.leave(self)
        self.memory.close()


pools = {}
capturing = None
"""The MUSAGraph whose capture is under way."""
_recording_to = set()
_handles = count(1)


def graph_pool_handle():
    """Return two integers, the first of them 0 (e205050, csrc/core/MUSACachingAllocator.cpp: MemPool)."""
    return (0, next(_handles))


def begin_allocate(handle):
    """Begin to record to a pool: it takes the share first and refuses a second recording then. A pool without a share
    can't be entered again (beginAllocateToPool)."""
    if handle in pools:
        if pools[handle].uses <= 0:
            raise error("a capture into a pool that was released")
        pools[handle].uses += 1
    else:
        pools[handle] = Pool()
    if handle in _recording_to:
        raise error("already recording to mempool_id")
    _recording_to.add(handle)


def end_allocate(handle):
    """End the recording. It raises if there is none and, with an option, while a stream is captured
    (endAllocateToPool)."""
    if simulated.machine.record_stream_reuse and platform.is_capturing():
        raise error("INTERNAL ASSERT FAILED: a stream of the capture is being captured")
    if handle not in _recording_to:
        raise error("not currently recording to mempool_id")
    _recording_to.remove(handle)


def release_pool(handle):
    """Give one share back. One too many is an error (releasePool)."""
    pool = pools.get(handle)
    if pool is None or pool.uses <= 0:
        raise error("INTERNAL ASSERT FAILED: the pool was released before")
    pool.uses -= 1


def empty_cache():
    """Free the pools without a share. During a capture it fails by an assertion (2.7.1:
    csrc/core/MUSACachingAllocator.cpp:2710-2717; of 2.11 not known)."""
    if capturing is not None:
        raise error("INTERNAL ASSERT FAILED: captures_underway.empty()")
    for handle, pool in list(pools.items()):
        if pool.uses == 0:
            pool.free()
            del pools[handle]

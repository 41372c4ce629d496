"""The simulator runs on specgraph's recorded graphs on the CPU: one device, whose tensors are CPU tensors."""

import os
from contextlib import contextmanager

import torch
from specgraph.device.cpu import CpuPlatform
from specgraph.errors import CaptureError, PlatformError

from torch_musa import simulated

VARIABLE = "SPECGRAPH_MUSA_SIMULATOR"
if os.environ.get(VARIABLE) != "cpu":
    raise ImportError(
        f"this torch_musa is specgraph's simulator, test equipment that drives no MUSA device, and {VARIABLE} is not "
        "cpu: set it to run tests on it, or take it off the path to use the real torch_musa"
    )

NAME = "cpu"
WHAT = "the CPU recorder"
STREAMS = 32

_platform = CpuPlatform()
_streams = [_platform.current_stream(), *(_platform.stream() for _ in range(STREAMS))]
_next_stream = 0


@contextmanager
def runtime_errors():
    """Turn the recorder's errors into RuntimeError, as calls of the runtime raise."""
    try:
        yield
    except (CaptureError, PlatformError) as error:
        raise RuntimeError(f"MUSA error (simulated): {error}") from error


def torch_device(index):
    return torch.device("cpu")


def present_devices():
    return simulated.machine.device_count


def synchronize(index):
    with runtime_errors():
        _platform.synchronize()


def properties(index):
    return {
        "name": "simulated MUSA device over recorded graphs on the CPU", "major": 3, "minor": 1,
        "is_multi_gpu_board": 0, "is_integrated": 0, "multi_processor_count": 1,
        "total_memory": _platform.memory().total,
    }  # fmt: skip


class StreamBase(torch.Stream):
    """The next of the runtime's pool of 32 streams, in turn, or the stream of the given id."""

    def __new__(cls, priority=0, stream_id=None, device_index=0, device_type=0, stream_ptr=0):
        global _next_stream
        if stream_id is None:
            stream_id = 1 + _next_stream % STREAMS
            _next_stream += 1
        self = super().__new__(cls, stream_id=stream_id, device_index=0, device_type=0)
        self.recorded = _streams[stream_id]
        return self

    @property
    def device(self):
        return torch_device(0)

    @property
    def musa_stream(self):
        return self.recorded.id

    def query(self):
        with runtime_errors():
            return self.recorded.query()

    def synchronize(self):
        with runtime_errors():
            self.recorded.synchronize()

    def __eq__(self, other):
        return self.recorded is other.recorded

    def __hash__(self):
        return hash(self.recorded.id)


class EventBase:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        self = super().__new__(cls)
        self.recorded = _platform.event(timing=enable_timing)
        return self

    def record(self, stream):
        with runtime_errors():
            self.recorded.record(stream.recorded)

    def wait(self, stream):
        with runtime_errors():
            self.recorded.wait(stream.recorded)

    def query(self):
        with runtime_errors():
            return self.recorded.query()

    def synchronize(self):
        with runtime_errors():
            self.recorded.synchronize()

    def elapsed_time(self, end_event):
        return self.recorded.elapsed_time(end_event.recorded)


def current_stream_id(index):
    return _streams.index(_platform.current_stream()), 0, 0


def default_stream_id(index):
    return 0, 0, 0


def use(stream):
    return _platform.use(stream.recorded)


def is_capturing():
    return _platform.is_capturing()


def memory_allocated(index):
    return _platform.memory().allocated


def memory_reserved(index):
    return _platform.memory().reserved


def memory_info(index):
    total = _platform.memory().total
    return total - _platform.memory().reserved, total


def get_rng_state(index):
    return torch.get_rng_state()


def set_rng_state(state, index):
    torch.set_rng_state(state)


class _Pool:
    """A private pool of the caching allocator: freed once its count is 0 and the cache is emptied."""

    def __init__(self):
        self.memory = _platform.graph_pool()
        self.entry = self.memory.enter()  # keeps the recorder's pool, which would free itself at a reset
        self.uses = 1

    def free(self):
        self.memory.leave(self.entry)
        self.memory.close()


_pools = {}
_recording_to = set()
_host_recording_to = set()
"""Newer torch (seen with torch.cuda 2.11) records host memory too, and only a capture that succeeds ends that."""
_handles = 0


def new_pool_handle():
    global _handles
    _handles += 1
    return (0, _handles)


def begin_allocate(index, handle):
    if handle in _pools:
        if _pools[handle].uses <= 0:
            raise RuntimeError("MUSA error (simulated): a capture into a pool that was released")
        _pools[handle].uses += 1
    else:
        _pools[handle] = _Pool()
    if handle in _recording_to:
        raise RuntimeError("MUSA error (simulated): the pool is being recorded to already")
    _recording_to.add(handle)


def end_allocate(index, handle):
    if handle not in _recording_to:
        raise RuntimeError("MUSA error (simulated): the pool is not being recorded to")
    _recording_to.remove(handle)


def release_pool(index, handle):
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
    """A recorded graph and the pool it was captured with."""

    def __init__(self):
        self._graph = self._context = None

    @property
    def is_pointed_to(self):
        """Return True if an allocator records to the pool for this capture."""
        return simulated.machine.release != "2.7.1" and self._is_recorded

    _is_recorded = False

    def begin(self, handle, error_mode):
        self.handle = handle or new_pool_handle()
        begin_allocate(0, self.handle)
        self._graph = _platform.graph(_pools[self.handle].memory)
        if simulated.machine.release != "2.7.1" and self.handle in _host_recording_to:
            raise RuntimeError("MUSA error (simulated): the host allocator is already recording to the pool")
        _host_recording_to.add(self.handle)
        self._is_recorded = True
        _platform.capture_stream = _platform.current_stream()
        self._context = self._graph.capture()
        with runtime_errors():
            self._context.__enter__()

    def end(self):
        context, self._context = self._context, None
        with runtime_errors():
            context.__exit__(None, None, None)
        end_allocate(0, self.handle)
        _host_recording_to.discard(self.handle)
        self._is_recorded = False

    @property
    def num_nodes(self):
        return self._graph.num_tasks

    def replay(self):
        with runtime_errors():
            self._graph.replay()

    def destroy(self):
        """Destroy the graph; the pool's count goes down only if the defect `reset_keeps_pool` is off."""
        self._graph.close()
        self._graph = None
        if not simulated.defects.reset_keeps_pool:
            release_pool(0, self.handle)

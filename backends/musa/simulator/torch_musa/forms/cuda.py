"""The simulator over torch.cuda: a real asynchronous GPU behind torch_musa's names."""

import torch

from torch_musa import simulated

NAME = "cuda"
WHAT = "torch.cuda"


def torch_device(index):
    return torch.device("cuda", index)


def present_devices():
    return min(simulated.machine.device_count, torch.cuda.device_count())


def device_guard(index):
    return torch.cuda.device(index)


set_device = torch.cuda.set_device
current_device = torch.cuda.current_device
synchronize = torch.cuda.synchronize
is_capturing = torch.cuda.is_current_stream_capturing
memory_allocated = torch.cuda.memory_allocated
memory_reserved = torch.cuda.memory_reserved
memory_info = torch.cuda.mem_get_info
manual_seed = torch.cuda.manual_seed
new_pool_handle = torch.cuda.graph_pool_handle
empty_cache = torch.cuda.empty_cache


def get_rng_state(index):
    return torch.cuda.get_rng_state(index)


def set_rng_state(state, index):
    torch.cuda.set_rng_state(state, index)


def properties(index):
    real = torch.cuda.get_device_properties(index)
    return {
        "name": f"simulated MUSA device over {real.name}", "major": real.major, "minor": real.minor,
        "is_multi_gpu_board": 0, "is_integrated": 0, "multi_processor_count": real.multi_processor_count,
        "total_memory": real.total_memory,
    }  # fmt: skip


class StreamBase(torch.cuda.Stream):
    @property
    def musa_stream(self):
        return self.cuda_stream


class EventBase(torch.cuda.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def musa_event(self):
        return self.cuda_event


def _id(stream):
    return stream.stream_id, stream.device_index, stream.device_type


def current_stream_id(index):
    return _id(torch.cuda.current_stream(index))


def default_stream_id(index):
    return _id(torch.cuda.default_stream(index))


def set_stream(stream):
    torch.cuda.set_stream(stream)


def enter_stream(stream):
    context = torch.cuda.stream(stream)
    context.__enter__()
    return context


def leave_stream(context, *, back=True):
    if back:
        context.__exit__(None, None, None)


def begin_allocate(index, handle):
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, handle)


def end_allocate(index, handle):
    torch._C._cuda_endAllocateToPool(index, handle)


def release_pool(index, handle):
    torch._C._cuda_releasePool(index, handle)


class Capture:
    """A CUDA graph."""

    def __init__(self):
        self._graph = torch.cuda.CUDAGraph()

    def begin(self, handle, error_mode):
        self._index = torch.cuda.current_device()
        pool = () if handle is None else (handle,)
        self._graph.capture_begin(*pool, capture_error_mode=error_mode)
        self.handle = handle

    def end(self):
        self._graph.capture_end()
        self.handle = self._graph.pool()

    num_nodes = 0

    def replay(self):
        self._graph.replay()

    def destroy(self):
        """Destroy the graph. torch.cuda gives the pool back, so `reset_keeps_pool` takes one more count first."""
        if simulated.defects.reset_keeps_pool:
            begin_allocate(self._index, self.handle)
            end_allocate(self._index, self.handle)
        self._graph.reset()

"""The caching allocator's counts, and MemPool."""

from torch_musa import form, simulated
from torch_musa.device import index_of

__all__ = ["MemPool", "empty_cache", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"]


def empty_cache():
    from torch_musa.graphs import captures

    if captures.current is not None:
        simulated.corrupt("cached memory is freed while a capture is under way")
    form.empty_cache()


def memory_allocated(device=None):
    return form.memory_allocated(index_of(device))


def memory_reserved(device=None):
    return form.memory_reserved(index_of(device))


def memory_stats(device=None):
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "reserved_bytes.all.current": memory_reserved(device),
    }


def mem_get_info(device=None):
    return form.memory_info(index_of(device))


class MemPool:
    """Holds an id only, as in 2.7.1: destroying it releases no memory."""

    def __init__(self, allocator=None):
        self._id = form.new_pool_handle()
        self._allocator = allocator

    @property
    def id(self):
        return self._id

    @property
    def allocator(self):
        return self._allocator

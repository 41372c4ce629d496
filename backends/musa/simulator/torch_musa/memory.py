"""The caching allocator's counts."""

from torch_musa import form, simulated
from torch_musa.device import index_of

__all__ = ["empty_cache", "mem_get_info", "memory_allocated", "memory_reserved"]


def empty_cache():
    from torch_musa.graphs import captures

    if captures.current is not None:
        simulated.corrupt("cached memory is freed while a capture is under way")
    form.empty_cache()


def memory_allocated(device=None):
    return form.memory_allocated(index_of(device))


def memory_reserved(device=None):
    return form.memory_reserved(index_of(device))


def mem_get_info(device=None):
    return form.memory_info(index_of(device))

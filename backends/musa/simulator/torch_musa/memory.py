"""The caching allocator's counts."""

from torch_musa import runtime, simulated

__all__ = ["empty_cache", "mem_get_info", "memory_allocated", "memory_reserved"]


def empty_cache():
    from torch_musa.graphs import captures

    if captures.current is not None:
        simulated.corrupt("cached memory is freed while a capture is under way")
    runtime.empty_cache()


def memory_allocated(device=None):
    return runtime.platform.memory().allocated


def memory_reserved(device=None):
    return runtime.platform.memory().reserved


def mem_get_info(device=None):
    memory = runtime.platform.memory()
    return memory.total - memory.reserved, memory.total

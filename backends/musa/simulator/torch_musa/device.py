"""Devices, the allocator's counts, and the default generator's state (e205050: core/device.py, core/memory.py)."""

from functools import lru_cache
from types import SimpleNamespace

import torch

from torch_musa import runtime, simulated
from torch_musa.runtime import empty_cache as empty_cache

__all__ = [
    "device", "device_count", "empty_cache", "get_device_properties", "get_rng_state", "is_available", "mem_get_info",
    "memory_allocated", "memory_reserved", "set_rng_state", "synchronize",
]  # fmt: skip


class device:
    def __init__(self, device):
        """There is one device."""

    def __enter__(self):
        pass

    def __exit__(self, *args):
        return False


def is_available():
    return simulated.machine.device_count > 0


@lru_cache(maxsize=1)
def device_count():
    """The first answer is kept (e205050: core/device.py)."""
    return simulated.machine.device_count


def synchronize(device=None):
    with runtime.errors():
        runtime.platform.synchronize()


def get_device_properties(device):
    return SimpleNamespace(
        name="simulated MUSA device over recorded graphs on the CPU", major=3, minor=1, is_multi_gpu_board=0,
        is_integrated=0, multi_processor_count=1, total_memory=runtime.platform.memory().total,
    )  # fmt: skip


def memory_allocated(device=None):
    return runtime.platform.memory().allocated


def memory_reserved(device=None):
    return runtime.platform.memory().reserved


def mem_get_info(device=None):
    memory = runtime.platform.memory()
    return memory.total - memory.reserved, memory.total


def get_rng_state(device="musa"):
    return torch.get_rng_state()


def set_rng_state(new_state, device="musa"):
    torch.set_rng_state(new_state)

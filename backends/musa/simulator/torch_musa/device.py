"""Devices: `torch_musa.device`, counts and properties."""

from functools import lru_cache
from types import SimpleNamespace

import torch

from torch_musa import runtime, simulated

__all__ = ["device", "device_count", "get_device_properties", "is_available", "synchronize"]


def index_of(device):
    """Return the index of a device given as an int, a torch.device or a string. None is the current device."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        index = device.partition(":")[2]
        return int(index) if index else 0
    if isinstance(device, torch.device) and device.index is not None:
        return device.index
    return 0


class device:
    def __init__(self, device):
        self.idx = index_of(device)

    def __enter__(self):
        pass

    def __exit__(self, *args):
        return False


def is_available():
    return simulated.machine.device_count > 0


@lru_cache(maxsize=1)
def device_count():
    return simulated.machine.device_count


def synchronize(device=None):
    with runtime.errors():
        runtime.platform.synchronize()


def get_device_properties(device):
    index = index_of(device)
    if not 0 <= index < simulated.machine.device_count:
        raise AssertionError(f"there is no simulated device {index}")
    return SimpleNamespace(
        name="simulated MUSA device over recorded graphs on the CPU", major=3, minor=1, is_multi_gpu_board=0,
        is_integrated=0, multi_processor_count=1, total_memory=runtime.platform.memory().total,
    )  # fmt: skip

"""Devices: `torch_musa.device`, counts and properties."""

from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import torch

from torch_musa import form

__all__ = [
    "current_device", "device", "device_count", "get_device_capability", "get_device_name", "get_device_properties",
    "init", "is_available", "is_initialized", "set_device", "synchronize",
]  # fmt: skip


def index_of(device):
    """The index of a device given as an int, a torch.device, a string, or None for the current one."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        index = device.partition(":")[2]
        return int(index) if index else form.current_device()
    if isinstance(device, torch.device) and device.index is not None:
        return device.index
    return form.current_device()


class device:
    def __init__(self, device):
        self.idx = index_of(device)
        self._guard = None

    def __enter__(self):
        self._guard = form.device_guard(self.idx) or nullcontext()
        self._guard.__enter__()

    def __exit__(self, *args):
        self._guard.__exit__(*args)
        return False


def set_device(device):
    form.set_device(index_of(device))


def current_device():
    return form.current_device()


def init():
    return None


def is_initialized():
    return True


def is_available():
    return form.present_devices() > 0


@lru_cache(maxsize=1)
def device_count():
    return form.present_devices()


def synchronize(device=None):
    form.synchronize(index_of(device))


def get_device_properties(device):
    index = index_of(device)
    if not 0 <= index < form.present_devices():
        raise AssertionError(f"there is no simulated device {index}")
    return SimpleNamespace(**form.properties(index))


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_capability(device=None):
    found = get_device_properties(device)
    return found.major, found.minor

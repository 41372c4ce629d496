"""A device for tests. torch drives it like a vendor's device, and its streams are threads of the CPU.

Importing this module loads `libasynccpu.so` (see the Makefile beside this folder), names the PrivateUse1 backend
`asynccpu` and registers the module as `torch.asynccpu`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path

import torch

simulated = "threads of the CPU, no device"
"""Reports show this as the kind of device."""
LIBRARY = Path(os.environ.get("ASYNCCPU_BUILD", Path(__file__).parents[1] / "build")) / "libasynccpu.so"


def autoload() -> None:
    """Do nothing: this is the entry point in the group `torch.backends`, and importing the module is enough."""


def is_available() -> bool:
    """Return True if there is a device."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices: the environment variable ASYNCCPU_DEVICES, or 2."""
    return torch.ops.asynccpu.device_count()


def current_device() -> int:
    """Return the index of this thread's current device."""
    return torch.accelerator.current_device_index()


def is_initialized() -> bool:
    """Return True: the library is loaded when this module is imported."""
    return True


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def get_device_name(device: int = 0) -> str:
    """Return the device's name, the same for every index."""
    return "threads of the CPU (asynccpu)"


def manual_seed_all(seed: int) -> None:
    """Seed the default generators of all devices. torch.manual_seed calls this."""
    torch.ops.asynccpu.manual_seed(seed % (1 << 63))


manual_seed = manual_seed_all


def get_rng_state(device: int | torch.device = 0) -> torch.Tensor:
    """Return the state of a device's default generator: 16 bytes on the host."""
    return torch.ops.asynccpu.get_rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: int | torch.device = 0) -> None:
    """Set the state of a device's default generator to one that `get_rng_state` returned."""
    torch.ops.asynccpu.set_rng_state(_index(device), state)


@contextlib.contextmanager
def held() -> Generator[None]:
    """Stop the current stream until the block is over. Tests use it to check that streams run independently of the host
    and of each other."""
    number = torch.ops.asynccpu.hold()
    try:
        yield
    finally:
        torch.ops.asynccpu.let_go(number)


def _index(device: int | torch.device) -> int:
    return device if isinstance(device, int) else device.index or 0


if not LIBRARY.is_file():
    raise ImportError(f"{LIBRARY} is missing: run make in {LIBRARY.parents[1]}, or set ASYNCCPU_BUILD to its folder")
torch.utils.rename_privateuse1_backend("asynccpu")
torch.ops.load_library(LIBRARY)
torch._register_device_module("asynccpu", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()

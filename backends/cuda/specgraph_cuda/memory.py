"""Host memory that kernels write: pinned memory as a tensor of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.device import Platform

_TYPES = {torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Lets torch make a CUDA tensor over pinned memory, and keeps that memory alive."""

    memory: Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        kind, at = _TYPES[self.memory.dtype], self.memory.data_ptr()
        return {"shape": tuple(self.memory.shape), "typestr": kind, "data": (at, False), "version": 2}


def mapped(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """See `specgraph.device.Platform.mapped_memory`. None where torch takes the memory for another GPU's."""
    with torch.cuda.device(device):
        host = torch.zeros(size, dtype=dtype, pin_memory=True)
        made = torch.as_tensor(_Pinned(host), device="cuda")
    return (made, host) if made.device == device and made.data_ptr() == host.data_ptr() else None


def host_sees_writes(platform: Platform) -> str | None:
    """Try whether host and kernels read what the other wrote; return what is wrong, or None."""
    both = mapped(4, torch.int64, platform.device)
    if both is None:
        return "torch made a copy, or a tensor of another GPU"
    on_device, host = both
    host.fill_(5)
    on_device.mul_(3)
    event = platform.event()
    event.record(platform.current_stream())
    event.synchronize()
    return None if host.tolist() == [15] * 4 else f"3 * 5 was read as {host.tolist()}"

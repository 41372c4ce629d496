"""Host integers in a graph: a kernel takes them as parameters and stores them in device memory.

The graph holds the integers in that kernel's node. Setting the node's parameters in the executable graph changes the
integers for all later launches; nothing is captured again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
from torch import Tensor

_PER_LAUNCH = 960
"""The most values per launch: kernel parameters may take 4 KiB."""

_THREADS = 128

_SOURCE = b"""
struct Values { int at[960]; };
extern "C" __global__ void store(int* out, int count, const __grid_constant__ Values values) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = values.at[i];
}
"""

_Values = ctypes.c_int * _PER_LAUNCH


class _Launch:
    """One launch of the kernel: its parameters, in host memory at a fixed address."""

    def __init__(self, out: Tensor) -> None:
        self.count = out.numel()
        self._values = _Values()
        self._held = ctypes.c_void_p(out.data_ptr()), ctypes.c_int(self.count), self._values
        self._pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in self._held))
        self.node = cu.CUDA_KERNEL_NODE_PARAMS()
        self.node.func = compiled(_SOURCE, b"store", out.device)
        self.node.gridDimX = self.node.gridDimY = self.node.gridDimZ = 1
        self.node.blockDimX, self.node.blockDimY, self.node.blockDimZ = _THREADS, 1, 1
        self.node.kernelParams = ctypes.addressof(self._pointers)

    def fill(self, values: Sequence[int]) -> None:
        self._values[: self.count] = values

    def issue(self, stream: int) -> None:
        pointers = ctypes.addressof(self._pointers)
        (status,) = cu.cuLaunchKernel(self.node.func, 1, 1, 1, _THREADS, 1, 1, 0, stream, pointers, 0)
        if status != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"storing host values failed: {status.name}")


@dataclass(slots=True, eq=False)
class StoredValues:
    """Device memory, int32 [n], and the launches that store host integers there."""

    memory: Tensor
    nodes: list[Any] = field(default_factory=list[Any])
    """The nodes of a graph that hold these launches, in order."""
    _launches: list[_Launch] = field(default_factory=list[_Launch])

    def __post_init__(self) -> None:
        self._launches += [_Launch(part) for part in self.memory.split(_PER_LAUNCH)]

    def fill(self, values: Sequence[int]) -> None:
        """Put the integers, one per element of `memory`, into the parameters. Touches no device."""
        for place, launch in enumerate(self._launches):
            launch.fill(values[place * _PER_LAUNCH : place * _PER_LAUNCH + launch.count])

    def issue(self) -> None:
        """Launch the stores on the current stream of the memory's device, which need not be the current device."""
        device = self.memory.device
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            for launch in self._launches:
                launch.issue(stream)

    def parameters(self) -> list[Any]:
        """Return the parameters of `nodes`."""
        return [launch.node for launch in self._launches]


def store(out: Tensor, values: Sequence[int]) -> None:
    """Write `values` to `out`, int32 and contiguous, on the current stream. A graph captures the values themselves."""
    stored = StoredValues(out[: len(values)])
    stored.fill(values)
    stored.issue()


@cache
def compiled(source: bytes, name: bytes, device: torch.device) -> Any:
    """Return the kernel `name` of a CUDA source, loaded into the context of `device`."""
    major, minor = torch.cuda.get_device_capability(device)
    program = _checked(nvrtc.nvrtcCreateProgram(source, name + b".cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    with torch.cuda.device(device):
        return _checked(cu.cuModuleGetFunction(_checked(cu.cuModuleLoadData(binary)), name))


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status):
        raise RuntimeError(f"compiling a kernel for CUDA graphs failed: {status.name}")
    return results[0] if results else None

"""Compiling, loading and launching CUDA kernels for GPUs of compute capability 9.0."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph_cuda.driver import checked

if TYPE_CHECKING:
    from specgraph.kernels.compilation import Compilation

_log = logging.getLogger(__name__)


def why_not() -> str | None:
    """Return the reason why kernels can't be compiled here, or None."""
    try:
        checked(nvrtc.nvrtcVersion())
    except Exception as error:  # cuda-bindings has its own exception types for a missing library
        return f"NVRTC is not there: {type(error).__name__}"
    return None


def compiled(text: str, name: str) -> bytes:
    """Compile CUDA source for compute capability 9.0 and return the machine code. The compiler's messages give `name`
    as the file."""
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        message = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, message))
        raise RuntimeError(f"{name} does not compile: {message.decode()}")
    binary = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def text(constants: Mapping[str, object], files: Sequence[str], functions: Sequence[str] = ()) -> str:
    """Return CUDA source: `constants` as macros, then `functions`, then the named files beside this module."""
    defined = [f"#define {name.upper()} {value}" for name, value in constants.items()]
    return "\n".join([*defined, *functions, *((Path(__file__).parent / name).read_text() for name in files)])


class Plan(Protocol):
    """The blocks that a problem is cut into."""

    @property
    def memory(self) -> int:
        """Return the bytes of shared memory per block."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A CUDA kernel, compiled once for each plan."""

    name: str
    """The name of the function, and of its file without the ending."""
    source: Callable[[Any], str]
    """Returns the CUDA source for a plan."""
    instead: str
    """The log's words for the slower kernels that run if this one can't be loaded."""


def compilation(kernel: Kernel, plan: Plan) -> Compilation:
    """Return the compilation of a kernel for a plan."""
    from specgraph.kernels.compilation import Compilation, digest

    written = kernel.source(plan)
    key = digest(written, checked(nvrtc.nvrtcVersion()))
    return Compilation(key, partial(compiled, written, f"{kernel.name}.cu"))


Load = Callable[[Kernel, Any, torch.device], Any]
"""(kernel, plan, device) -> the loaded kernel or None, as `loaded` returns it."""


@cache
def loaded(kernel: Kernel, plan: Plan, device: torch.device) -> Any | None:
    """Compile a kernel for a plan and load it into the context of a device.

    None, with the reason in the log, if it can't be compiled or loaded: a driver older than NVRTC refuses NVRTC's code.
    For meta tensors nothing is compiled, and `kernel` itself is returned.
    """
    if device.type == "meta":
        return kernel
    try:
        binary = compilation(kernel, plan).result()
        with torch.cuda.device(device):
            function = checked(cu.cuModuleGetFunction(checked(cu.cuModuleLoadData(binary)), kernel.name.encode()))
            most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(cu.cuFuncSetAttribute(function, most, plan.memory))
        return function
    except RuntimeError as error:
        _log.warning("%s, which is slower: %s", kernel.instead, str(error).partition("\n")[0])
        return None


def is_aligned(tensor: Tensor) -> bool:
    """Return whether the rows don't overlap and each starts at a multiple of 16 bytes: a tensor copy needs both."""
    rows = tensor.stride(0)
    return tensor.stride(1) == 1 and rows >= tensor.shape[1] and rows % 8 == 0 and tensor.data_ptr() % 16 == 0


class TensorMap:
    """A tensor map of rows, read in swizzled boxes of 64 columns (128 bytes).

    It is made without cuda-bindings, because the driver refuses the alignment of cuda-bindings' tensor maps.
    """

    def __init__(self, tensor: Tensor, box_rows: int) -> None:
        if tensor.is_meta:
            return
        self._memory = (ctypes.c_char * 256)()
        self.address = -(-ctypes.addressof(self._memory) // 128) * 128
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            int(cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
            2,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 2)(tensor.shape[1], tensor.shape[0]),
            (ctypes.c_uint64 * 1)(tensor.stride(0) * tensor.itemsize),
            (ctypes.c_uint32 * 2)(64, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        checked((cu.CUresult(status),))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch_early(
    kernel: Kernel, plan: Plan, blocks: int, threads: int, device: torch.device, maps: Sequence[TensorMap],
    arguments: Sequence[Any],
) -> None:  # fmt: skip
    """Launch a kernel on the current stream. The kernel may start before the stream's previous kernel has ended.

    Args:
        maps: the kernel's first arguments.
        arguments: its other arguments, as ctypes values.
    """
    if device.type == "meta":
        return
    addresses = [each.address for each in maps] + [ctypes.addressof(value) for value in arguments]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    overlap = cu.CUlaunchAttribute()
    overlap.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = plan.memory
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs = [overlap]
    config.numAttrs = 1
    checked(cu.cuLaunchKernelEx(config, loaded(kernel, plan, device), ctypes.addressof(pointers), 0))

"""Compiling and launching `many_rows.cu`: linears of 65 to 384 rows on GPUs of compute capability 9.0."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph.kernels.triton.launch import ManyRows
from specgraph_cuda.many_rows_plan import Kind, Plan, plan_for
from specgraph_cuda.nodes import checked

_log = logging.getLogger(__name__)

_EVICT_NORMAL, _EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
"""Cache hints of a tensor copy, as CUTLASS's `TMA::CacheHintSm90` has them."""


ChoosePlan = Callable[[Kind, int, int, int], "Plan | None"]
"""See `many_rows_plan.plan_for`."""


def linears(choose: ChoosePlan = plan_for) -> ManyRows:
    """The kernel's two kinds; see `specgraph.kernels.triton.launch.ManyRows`."""

    def gated(x: Tensor, weight: Tensor) -> Tensor | None:
        if (plan := _plan(choose, "GATED", x, weight)) is None:
            return None
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        launch(plan, x, weight, out)
        return out

    def parts(x: Tensor, weight: Tensor) -> Tensor | None:
        if (plan := _plan(choose, "PARTS", x, weight)) is None:
            return None
        out = x.new_empty(plan.split, x.shape[0], weight.shape[0], dtype=torch.float32)
        launch(plan, x, weight, out)
        return out

    return ManyRows(gated, parts)


def _plan(choose: ChoosePlan, kind: Kind, x: Tensor, weight: Tensor) -> Plan | None:
    """The plan of one linear, where these tensors are what the kernel takes and it can be loaded."""
    columns = weight.shape[0] // 2 if kind == "GATED" else weight.shape[0]
    plan = choose(kind, x.shape[0], columns, x.shape[1])
    if plan is None or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not _aligned(x):
        return None
    if not _aligned(weight) or not weight.is_contiguous() or not _fits(plan, x.shape[1]):
        return None
    return plan if _loaded(plan, x.device) is not None else None


def _fits(plan: Plan, depth: int) -> bool:
    """Whether the input columns are whole tiles of 64, and at least one for each block that shares them."""
    return depth % 64 == 0 and depth // 64 >= plan.split


def _aligned(tensor: Tensor) -> bool:
    """Whether rows do not overlap and each starts at a multiple of 16 bytes, as a tensor copy needs it."""
    rows = tensor.stride(0)
    return tensor.stride(1) == 1 and rows >= tensor.shape[1] and rows % 8 == 0 and tensor.data_ptr() % 16 == 0


def why_not() -> str | None:
    """Why the kernel can't be compiled here, or None."""
    try:
        checked(nvrtc.nvrtcVersion())
    except Exception as error:  # cuda-bindings has exceptions of its own for a library that it doesn't find
        return f"NVRTC is not there: {type(error).__name__}"
    return None


def source(plan: Plan) -> str:
    """The CUDA text of one variant."""
    count = plan.columns // 2
    constants = {"GATED": 0, "PARTS": 1, "KIND": plan.kind, "GROUPS": plan.groups}
    constants |= {"COLUMNS": plan.columns, "STAGES": plan.stages, "SPLIT": plan.split}
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    multiply = (
        f'asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{count + 2}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{plan.columns}k16.f32.bf16.bf16 "
        f'{{{", ".join(f"%{i}" for i in range(count))}}}, %{count}, %{count + 1}, add, 1, 1, 0, 0; }}" '
        f': {sums} : "l"(x), "l"(weight), "r"(add));'
    )
    given = f"float (&sums)[{count}]"
    product = f"{given}, unsigned long long x, unsigned long long weight, int add"
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in constants.items()),
            f"__device__ __forceinline__ void multiply({product}) {{ {multiply} }}",
            f'__device__ __forceinline__ void keep({given}) {{ asm volatile("" : {sums} :: "memory"); }}',
            (Path(__file__).parent / "many_rows.cu").read_text(),
        ]
    )


def compiled(text: str) -> bytes:
    """Machine code for compute capability 9.0."""
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"many_rows.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        message = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, message))
        raise RuntimeError(f"many_rows.cu does not compile: {message.decode()}")
    binary = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


@cache
def _loaded(plan: Plan, device: torch.device) -> Any | None:
    """The kernel of one variant in the context of a device; None where it can't be compiled or loaded, and why is
    logged: a driver older than NVRTC refuses its code."""
    try:
        binary = compiled(source(plan))
        with torch.cuda.device(device):
            kernel = checked(cu.cuModuleGetFunction(checked(cu.cuModuleLoadData(binary)), b"many_rows"))
            most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(cu.cuFuncSetAttribute(kernel, most, plan.memory))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        _log.warning("linears of more than 64 rows run in the library's matmul, which is slower: %s", reason)
        return None
    return kernel


class _TensorMap:
    """A tensor map of rows that are read in boxes of 64 columns, 128 bytes, swizzled.

    Made without cuda-bindings, whose tensor maps lie at addresses that are not aligned as the driver wants them.
    """

    def __init__(self, tensor: Tensor, box_rows: int) -> None:
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


def launch(plan: Plan, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Launch on the current stream. The kernel before must not write the weight, which is read before that one ends.

    Args:
        x: bfloat16 [T, in]; `in` a multiple of 64, at least 64 * plan.split; rows at multiples of 16 bytes.
        weight: [out, in], contiguous; gated [2 * out, in], gate rows first. `out` a multiple of 8.
        out: contiguous, as `KIND` of many_rows.cu says.
    """
    rows, columns = x.shape[0], weight.shape[0] // (2 if plan.kind == "GATED" else 1)
    blocks = -(-rows // plan.rows)
    maps = _TensorMap(x, plan.rows), _TensorMap(weight, plan.written)
    held = (
        ctypes.c_void_p(out.data_ptr()),
        *map(ctypes.c_int, (rows, columns, x.shape[1], blocks)),
        ctypes.c_uint64(_EVICT_NORMAL if blocks > 1 else _EVICT_FIRST),  # other rows come after these, or none
    )
    addresses = [each.address for each in maps] + [ctypes.addressof(value) for value in held]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    overlap = cu.CUlaunchAttribute()
    overlap.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks * -(-columns // plan.written) * plan.split, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128 * plan.groups, 1, 1
    config.sharedMemBytes = plan.memory
    config.hStream = torch.cuda.current_stream(x.device).cuda_stream
    config.attrs = [overlap]
    config.numAttrs = 1
    kernel = _loaded(plan, x.device)
    checked(cu.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))

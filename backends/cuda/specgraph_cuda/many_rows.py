"""Compiling and launching `many_rows.cu`: linears of up to 384 rows on GPUs of compute capability 9.0."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from specgraph.kernels.launch import ManyRows
from specgraph_cuda.hopper import Kernel, Load, TensorMap, is_aligned, launch_early, loaded, text
from specgraph_cuda.many_rows_plan import Kind, Plan, plan_for

_EVICT_NORMAL, _EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
"""Cache hints of a tensor copy, with the values of CUTLASS's `TMA::CacheHintSm90`."""


ChoosePlan = Callable[[Kind, int, int, int], "Plan | None"]
"""(kind, rows, columns, depth) -> the plan, as `many_rows_plan.plan_for` returns it."""


class _Best(ctypes.Structure):
    """`Best` of many_rows.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("column", "step", "step_copy")]


def linears(choose: ChoosePlan = plan_for, load: Load = loaded) -> ManyRows:
    """Return the launches of the kernel's three variants; see `specgraph.kernels.launch.ManyRows`."""

    def takes(kind: Kind, x: Tensor, weight: Tensor) -> bool:
        return _plan(choose, load, kind, x, weight) is not None

    def gated(x: Tensor, weight: Tensor) -> Tensor | None:
        if (plan := _plan(choose, load, "GATED", x, weight)) is None:
            return None
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        launch(plan, x, weight, out)
        return out

    def parts(x: Tensor, weight: Tensor) -> Tensor | None:
        if (plan := _plan(choose, load, "PARTS", x, weight)) is None:
            return None
        out = x.new_empty(plan.split, x.shape[0], weight.shape[0], dtype=torch.float32)
        launch(plan, x, weight, out)
        return out

    def best(x: Tensor, weight: Tensor, step: Tensor | None, copy: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if (plan := _plan(choose, load, "BEST", x, weight)) is None:
            return None
        shape = x.shape[0], -(-weight.shape[0] // plan.columns)
        value, column = x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
        launch(plan, x, weight, value, column=column, step=step, step_copy=copy)
        return value, column

    return ManyRows(takes, gated, parts, best)


def _plan(choose: ChoosePlan, load: Load, kind: Kind, x: Tensor, weight: Tensor) -> Plan | None:
    """Return the plan of one linear. None if the kernel does not take these tensors, or can't be loaded."""
    columns = weight.shape[0] // 2 if kind == "GATED" else weight.shape[0]
    plan = choose(kind, x.shape[0], columns, x.shape[1])
    if plan is None or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not is_aligned(x):
        return None
    if not is_aligned(weight) or not weight.is_contiguous() or not _fits(plan, x.shape[1]):
        return None
    return plan if load(KERNEL, plan, x.device) is not None else None


def _fits(plan: Plan, depth: int) -> bool:
    """Return whether the input columns are whole tiles of 64, at least one for each block that shares them."""
    return depth % 64 == 0 and depth // 64 >= plan.split


def source(plan: Plan) -> str:
    """Return the CUDA source of the kernel for one plan."""
    count = plan.columns // 2
    constants = {"GATED": 0, "PARTS": 1, "BEST": 2, "KIND": plan.kind, "GROUPS": plan.groups}
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
    functions = (
        f"__device__ __forceinline__ void multiply({product}) {{ {multiply} }}",
        f'__device__ __forceinline__ void keep({given}) {{ asm volatile("" : {sums} :: "memory"); }}',
    )
    return text(constants, ("hopper.cuh", "many_rows.cu"), functions)


KERNEL = Kernel("many_rows", source, "linears of more than 32 rows run in Triton and the library")


def launch(plan: Plan, x: Tensor, weight: Tensor, out: Tensor, **best: Tensor | None) -> None:
    """Launch on the current stream.

    The kernel reads the weight while the kernel launched before it may still run, so that one must not write it.

    Args:
        x: bfloat16 [T, in]; `in` is a multiple of 64, at least 64 * plan.split; each row starts at a multiple of 16
            bytes.
        weight: [out, in], contiguous; for a gated linear [2 * out, in], gate rows first. `out` is a multiple of 8.
        out: contiguous; `KIND` in many_rows.cu gives its shape and dtype.
        best: fields of `Best` in many_rows.cu.
    """
    rows, columns = x.shape[0], weight.shape[0] // (2 if plan.kind == "GATED" else 1)
    blocks = -(-rows // plan.rows)
    maps = TensorMap(x, plan.rows), TensorMap(weight, plan.written)
    held = (
        ctypes.c_void_p(out.data_ptr()),
        *map(ctypes.c_int, (rows, columns, x.shape[1], blocks)),
        ctypes.c_uint64(_EVICT_NORMAL if blocks > 1 else _EVICT_FIRST),  # another block of rows reads the weights again
        _Best(**{name: tensor.data_ptr() for name, tensor in best.items() if tensor is not None}),
    )
    grid = blocks * -(-columns // plan.written) * plan.split
    launch_early(KERNEL, plan, grid, 128 * plan.groups, x.device, maps, held)

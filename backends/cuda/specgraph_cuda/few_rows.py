"""Compiling and launching `few_rows.cu`: a linear of up to 32 rows on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from specgraph.kernels.launch import FewRows
from specgraph_cuda.few_rows_plan import Plan, plan_for
from specgraph_cuda.hopper import Kernel, Load, TensorMap, is_aligned, launch_early, loaded, text

ChoosePlan = Callable[[bool, int, int, int], "Plan | None"]
"""(best, rows, depth, columns) -> the plan, as `few_rows_plan.plan_for` returns it."""


class _Output(ctypes.Structure):
    """`Output` of few_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("residual", "out", "best", "best_column", "step", "step_copy")),
        *((name, ctypes.c_int) for name in ("rows", "depth", "columns", "residual_stride")),
    ]


def few_rows(choose: ChoosePlan = plan_for, load: Load = loaded) -> FewRows:
    """Return the launches of the kernel's two variants; see `specgraph.kernels.launch.FewRows`."""

    def linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor | None:
        if (plan := _plan(choose, load, False, x, weight)) is None or weight.shape[0] % 2:
            return None
        if residual is not None and not (residual.dtype == x.dtype and _holds_pairs(residual)):
            return None
        out = x.new_empty(x.shape[0], weight.shape[0])
        _launch(plan, x, weight, residual=residual, out=out)
        return out

    def best(x: Tensor, weight: Tensor, step: Tensor | None, copy: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if (plan := _plan(choose, load, True, x, weight)) is None:
            return None
        shape = x.shape[0], plan.parts(weight.shape[0])
        value, column = x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
        _launch(plan, x, weight, best=value, best_column=column, step=step, step_copy=copy)
        return value, column

    return FewRows(linear, best)


def _plan(choose: ChoosePlan, load: Load, best: bool, x: Tensor, weight: Tensor) -> Plan | None:
    """Return the plan of one linear. None if the kernel does not take these tensors, or can't be loaded."""
    plan = choose(best, x.shape[0], x.shape[1], weight.shape[0])
    if plan is None or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or x.shape[1] % (64 * plan.stage_tiles):
        return None
    if not is_aligned(x) or not is_aligned(weight) or not weight.is_contiguous():
        return None
    return plan if load(KERNEL, plan, x.device) is not None else None


def _holds_pairs(rows: Tensor) -> bool:
    """Return whether the kernel can read two neighbouring columns of a row with one load of 4 bytes."""
    return rows.stride(1) == 1 and rows.stride(0) % 2 == 0 and rows.data_ptr() % 4 == 0


def source(plan: Plan) -> str:
    """Return the CUDA source of the kernel for one plan."""
    names = "rows", "columns", "stage_tiles", "best", "stages", "stage_bytes", "window"
    constants = {name: getattr(plan, name) for name in names} | {"ahead": 0}
    return text(constants, ("hopper.cuh", "few_rows.cuh", "few_rows.cu"))


KERNEL = Kernel("few_rows", source, "linears of few rows run in Triton's kernel")


def _launch(plan: Plan, x: Tensor, weight: Tensor, **tensors: Tensor | None) -> None:
    """Launch on the current stream.

    The kernel reads the weight while the kernel launched before it may still run, so that one must not write it.

    Args:
        x: bfloat16 [T, in], T at most plan.rows; each row starts at a multiple of 16 bytes.
        weight: [out, in], contiguous.
        tensors: fields of `Output` in few_rows.cu.
    """
    residual = tensors.get("residual")
    output = _Output(
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        rows=x.shape[0], depth=x.shape[1], columns=weight.shape[0],
        residual_stride=0 if residual is None else residual.stride(0),
    )  # fmt: skip
    maps = TensorMap(x, plan.rows), TensorMap(weight, plan.columns)
    launch_early(KERNEL, plan, plan.blocks(weight.shape[0]), plan.threads, x.device, maps, (output,))

"""Compiling and launching `two_linears.cu`: two linears with a norm between them in one kernel on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.kernels.launch import TwoLinears
from specgraph_cuda.hopper import Kernel, Load, TensorMap, is_aligned, launch_early, loaded, text
from specgraph_cuda.two_linears_plan import Plan, plan_for

ChoosePlan = Callable[[bool, int, int, int, int], "Plan | None"]
"""(gated, rows, depth, size, columns) -> the plan, as `two_linears_plan.plan_for` returns it."""

_ENTRIES, _ENTRY = 4096, 192
"""The launches that memory is allocated for at a time, and int32 elements for each: `Progress` of two_linears.cu."""


@dataclass(slots=True)
class ProgressMemory:
    """Zeroed memory in which the blocks of a launch tell each other how far they are. A launch leaves it zeroed.

    Launches that may run at the same time need separate memory. Each captured launch therefore keeps its own for good,
    and launches outside of captures share the memory of their stream.
    """

    free: dict[torch.device, list[Tensor]] = field(default_factory=dict[torch.device, list[Tensor]])
    of_streams: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict[tuple[torch.device, int], Tensor])
    """The memory of each stream, by device and handle: the default stream of every device has the handle 0."""

    def take(self, device: torch.device) -> Tensor | None:
        """Return memory for one launch on the current stream. None in a capture if no free memory is left: a capture
        can't allocate it."""
        if device.type == "meta":
            return torch.empty(_ENTRY, dtype=torch.int32, device=device)
        free = self.free.setdefault(device, [])
        stream = torch.cuda.current_stream(device)
        if torch.cuda.is_current_stream_capturing():
            return free.pop() if free else None
        if len(free) < _ENTRIES // 2:
            made = torch.zeros(_ENTRIES, _ENTRY, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # other streams use it
            free.extend(made.unbind())
        key = device, stream.cuda_stream
        if key not in self.of_streams:
            self.of_streams[key] = free.pop()
        return self.of_streams[key]


class _First(ctypes.Structure):
    """`First` of two_linears.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "norm", "total", "scaled", "squares")),
        *((name, ctypes.c_int) for name in ("rows", "depth", "size", "x_stride", "residual_stride")),
    ]


def two_linears_in_one(choose: ChoosePlan = plan_for, load: Load = loaded) -> TwoLinears:
    """Return the function that launches the kernel; see `specgraph.kernels.launch.TwoLinears`."""
    memory = ProgressMemory()

    def launched(
        x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, following: Tensor, gated: bool
    ) -> tuple[Tensor, Tensor] | None:
        columns = following.shape[0] // 2 if gated else following.shape[0]
        plan = choose(gated, x.shape[0], x.shape[1], weight.shape[0], columns)
        if plan is None or not _takes(plan, x, weight, residual, norm, following):
            return None
        if load(KERNEL, plan, x.device) is None or (progress := memory.take(x.device)) is None:
            return None
        return launch(plan, x, weight, residual, norm, eps, following, progress)

    return launched


def _takes(plan: Plan, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, following: Tensor) -> bool:
    """Return whether the kernel can read these tensors: bfloat16, aligned, weights and norm contiguous, whole tiles."""
    whole = weight.shape[1] % (64 * plan.first_tiles) == 0 and weight.shape[0] % (64 * plan.second_tiles) == 0
    tensors = x, weight, residual, norm, following
    kept = all(tensor.dtype == torch.bfloat16 for tensor in tensors) and norm.is_contiguous()
    contiguous = weight.is_contiguous() and following.is_contiguous() and residual.stride(1) == 1
    aligned = is_aligned(x) and is_aligned(weight) and is_aligned(following)
    return whole and kept and contiguous and aligned and following.shape[0] % (2 * plan.halves) == 0


def source(plan: Plan) -> str:
    """Return the CUDA source of the kernel for one plan."""
    names = "rows", "first", "second", "halves", "first_tiles", "second_tiles", "stages", "stage_bytes", "window"
    constants = {name: getattr(plan, name) for name in (*names, "ahead", "late")}
    return text(constants, ("hopper.cuh", "few_rows.cuh", "two_linears.cu"))


KERNEL = Kernel("two_linears", source, "two linears run in two kernels")


def launch(
    plan: Plan, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, following: Tensor,
    progress: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch on the current stream.

    The kernel reads the weights while the kernel launched before it may still run, so that one must not write them.

    Args:
        x: bfloat16 [T, in], T at most plan.rows; each row starts at a multiple of 16 bytes.
        weight: [size, in].
        residual: [T, size].
        norm: [size].
        following: [out, size]; if plan.halves is 2, [2 * out, size] with the gate rows first.
        progress: from `ProgressMemory.take`.

    Returns:
        The sum of residual and first product, [T, size], and the second product, [T, out].
    """
    rows, size, columns = x.shape[0], weight.shape[0], following.shape[0] // plan.halves
    total, scaled, out = x.new_empty(rows, size), x.new_empty(rows, size), x.new_empty(rows, columns)
    squares = x.new_empty(rows, -(-size // plan.first), dtype=torch.float32)
    first = _First(
        *(tensor.data_ptr() for tensor in (x, weight, residual, norm, total, scaled, squares)),
        *(rows, x.shape[1], size, x.stride(0), residual.stride(0)),
    )
    maps = (
        *(TensorMap(x, plan.rows), TensorMap(weight, plan.first)),
        *(TensorMap(scaled, plan.rows), TensorMap(following, plan.second)),
    )
    pointers = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(progress.data_ptr())
    arguments = first, *pointers, ctypes.c_int(columns), ctypes.c_float(eps)
    launch_early(KERNEL, plan, plan.blocks(size, columns), plan.threads, x.device, maps, arguments)
    return total, out

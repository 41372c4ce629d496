"""Triton kernels of convolutions inside the blocks of a block drafter. They never store a row's combined kernel."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import ceil_div, contiguous_rows, power_of_two
from specgraph.ops.linear import Norm
from specgraph_models.kernels.gate_up import GateUpOps

_COLUMNS = 1024
"""Channels per program."""


@triton.jit
def convolved(
    x, base, groups, row, column, inside, size, rows, x_stride, groups_stride, num_groups, TAPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return the channels `column` of one row after the convolution, in float32."""
    place = row % rows
    total = tl.zeros(column.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        value = tl.load(x + (row - tap) * x_stride + column, mask=inside & (tap <= place), other=0.0).to(tl.float32)
        kernel = tl.load(base + tap * size + column, mask=inside, other=0.0).to(tl.float32)
        of_group = groups + row * groups_stride + tap * num_groups + column // GROUP
        total += value * (kernel + tl.load(of_group, mask=inside, other=0.0).to(tl.float32))
    return total


@triton.jit
def convolve_kernel(
    x, base, groups, out, size, rows, x_stride, groups_stride, num_groups, TAPS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [T, size], one program per row and COLUMNS channels."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    total = convolved(
        x, base, groups, row, column, inside, size, rows, x_stride, groups_stride, num_groups, TAPS, GROUP
    )
    tl.store(out + row * size + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolve_and_norm_kernel(
    x, base, groups, residual, norm, out, normed, size, rows, x_stride, groups_stride, num_groups, residual_stride, eps,
    TAPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [T, size], the convolution plus residual, and normed = rms_norm(out), one program per row."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < size
    total = convolved(
        x, base, groups, row, column, inside, size, rows, x_stride, groups_stride, num_groups, TAPS, GROUP
    )
    total += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + row * size + column, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    wide *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + column, wide.to(out.dtype.element_ty), mask=inside)


class ConvolutionOps(GateUpOps):
    """Implementations of `convolve_blocks` and `convolve_and_norm`."""

    __slots__ = ()

    def convolve_blocks(self, x: Tensor, base: Tensor, groups: Tensor, rows: int) -> Tensor:
        x, out = contiguous_rows(x), x.new_empty(x.shape)
        (count, size), taps = x.shape, base.shape[0]
        num_groups = groups.shape[1] // taps
        if count:
            self.launch(
                convolve_kernel, (count, ceil_div(size, _COLUMNS)),
                x, base.contiguous(), groups, out, size, rows, x.stride(0), groups.stride(0), num_groups, TAPS=taps,
                GROUP=size // num_groups, COLUMNS=_COLUMNS, num_warps=4,
            )  # fmt: skip
        return out

    def convolve_and_norm(
        self, x: Tensor, base: Tensor, groups: Tensor, rows: int, residual: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        x, residual = contiguous_rows(x), contiguous_rows(residual)
        out, normed, (count, size), taps = x.new_empty(x.shape), x.new_empty(x.shape), x.shape, base.shape[0]
        num_groups = groups.shape[1] // taps
        if count:
            self.launch(
                convolve_and_norm_kernel, (count,),
                x, base.contiguous(), groups, residual, norm.weight, out, normed, size, rows, x.stride(0),
                groups.stride(0), num_groups, residual.stride(0), norm.eps, TAPS=taps, GROUP=size // num_groups,
                WIDTH=power_of_two(size), num_warps=8,
            )  # fmt: skip
        return out, normed

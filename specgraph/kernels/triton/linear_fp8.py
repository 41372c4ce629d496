# type: ignore  (what Triton compiles is not what a type checker reads)
"""Linears over FP8 weights (e4m3), whose products are computed by the FP8 units of the GPU.

No weight is converted: each activation is written as the sum of two e4m3 numbers, high + low / 16, times a scale of its
row, which is within 2 ** -8 of it, about what bfloat16 rounds to. Both are rows of the other operand, so one product
reads each weight once. Products are added up in float32 at least every 128 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    x, norm, parts, factors, width, x_stride, eps, NORMED: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """parts [T, 2, width] and factors [T] of x [T, width], or of rms_norm(x); one program per row."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    at = x + row * x_stride + column
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        values *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30) / 448.0
    scaled = values / factor
    high = scaled.to(parts.dtype.element_ty)
    low = ((scaled - high.to(tl.float32)) * 16.0).to(parts.dtype.element_ty)
    tl.store(parts + row * 2 * width + column, high, mask=inside)
    tl.store(parts + (row * 2 + 1) * width + column, low, mask=inside)
    tl.store(factors + row, factor)


@triton.jit
def dequantise_kernel(
    weight, scale, out, columns, depth, scale_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """out = weight * scale in the dtype of out; one program per row and WIDTH of its columns."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = inner < depth
    values = tl.load(weight + row * depth + inner, mask=inside, other=0.0).to(tl.float32)
    if GROUP:
        values *= tl.load(scale + inner // GROUP * scale_stride + row, mask=inside, other=0.0)
    else:
        values *= tl.load(scale + row)
    tl.store(out + row * depth + inner, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def first_bytes(weight, columns, depth, PREFETCH: tl.constexpr):
    """Addresses (int64) of the cache lines of the first PREFETCH input columns of these rows of `weight`."""
    lines = tl.arange(0, PREFETCH // 128) * 128
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def add_product(acc, a, w, scales, WEIGHTS_FIRST: tl.constexpr, GROUPED: tl.constexpr):
    """acc [rows, columns] + a @ w.T, or both transposed; with GROUPED the product is scaled before the sum."""
    MOST: tl.constexpr = 128 if w.shape[1] >= 128 else w.shape[1]
    if WEIGHTS_FIRST:
        if GROUPED:
            acc += tl.dot(w, tl.trans(a)) * tl.load(scales)[:, None]
        else:
            acc = tl.dot(w, tl.trans(a), acc, max_num_imprecise_acc=MOST)
    else:
        if GROUPED:
            acc += tl.dot(a, tl.trans(w)) * tl.load(scales)[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=MOST)
    return acc


@triton.jit
def joined(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """The products of whole activations, [ROWS, COLUMNS], of those of their two parts."""
    if not WEIGHTS_FIRST:
        acc = tl.trans(acc)
    high, low = tl.split(tl.reshape(acc, (COLUMNS, ROWS, 2)))
    return tl.trans(high + low * 0.0625)


@triton.jit
def linear_fp8_kernel(
    parts, factors, weight, scale, bias, residual, out, rows, columns, depth, scale_stride, residual_stride,
    BIASED: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = x @ (weight * scale).T + bias + residual of x in two parts (`split_kernel`); one program per block of
    ROWS and of COLUMNS. GROUP: input columns that share a scale, 0 for all of them."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False)
    part = (tl.program_id(0) * 2 * ROWS + tl.arange(0, 2 * ROWS)).to(tl.int64)
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = parts + part[:, None] * depth + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((COLUMNS, 2 * ROWS) if WEIGHTS_FIRST else (2 * ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(a_rows + k, mask=(part < 2 * rows)[:, None], other=0.0)
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        acc = add_product(acc, a, w, at, WEIGHTS_FIRST, GROUP > 0)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    result = joined(acc, ROWS, COLUMNS, WEIGHTS_FIRST) * tl.load(factors + row, mask=live, other=0.0)[:, None]
    if GROUP == 0:
        result *= tl.load(scale + safe)[None, :]
    mask = live[:, None] & (column < columns)[None, :]
    if BIASED:
        result += tl.load(bias + safe)[None, :].to(tl.float32)
    if RESIDUAL:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        at = residual + row[:, None] * residual_stride + column[None, :]
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_fp8_kernel(
    parts, factors, weight, scale, bias, out, rows, columns, depth, scale_stride,
    BIASED: tl.constexpr, GROUP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up with gate, up = x @ (weight * scale).T; `columns` are those of out."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_bytes(weight, safe + columns, depth, PREFETCH), START=False)
    part = (tl.program_id(0) * 2 * ROWS + tl.arange(0, 2 * ROWS)).to(tl.int64)
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = parts + part[:, None] * depth + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((COLUMNS, 2 * ROWS) if WEIGHTS_FIRST else (2 * ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, 2 * ROWS) if WEIGHTS_FIRST else (2 * ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(a_rows + k, mask=(part < 2 * rows)[:, None], other=0.0)
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        w = tl.load(gate_rows + k, eviction_policy="evict_first")
        gate = add_product(gate, a, w, at, WEIGHTS_FIRST, GROUP > 0)
        w = tl.load(up_rows + k, eviction_policy="evict_first")
        up = add_product(up, a, w, at + columns, WEIGHTS_FIRST, GROUP > 0)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    factor = tl.load(factors + row, mask=live, other=0.0)[:, None]
    left = joined(gate, ROWS, COLUMNS, WEIGHTS_FIRST) * factor
    right = joined(up, ROWS, COLUMNS, WEIGHTS_FIRST) * factor
    if GROUP == 0:
        left *= tl.load(scale + safe)[None, :]
        right *= tl.load(scale + columns + safe)[None, :]
    if BIASED:
        left += tl.load(bias + safe)[None, :].to(tl.float32)
        right += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    left = left.to(out.dtype.element_ty).to(tl.float32)
    right = right.to(out.dtype.element_ty).to(tl.float32)
    result = left * tl.sigmoid(left) * right
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)

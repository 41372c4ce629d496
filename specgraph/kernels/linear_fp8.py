# type: ignore  (what Triton compiles is not what a type checker reads)
"""Linears over FP8 weights (e4m3), multiplied in float16.

e4m3 fits float16, and one instruction converts two of them; bfloat16 takes three. Activations are divided by a power of
two per row first, so that they fit as well, and have three bits more than in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.linear import load_rows
from specgraph.kernels.norm import normed_row


@triton.jit
def scaled_kernel(x, norm, scaled, factors, width, x_stride, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """scaled float16 [T, width] and factors [T], whose product is x [T, width] or rms_norm(x); one program per row."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    values = normed_row(x + row * x_stride, norm, width, eps, WIDTH)
    if norm is not None:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    factor = tl.exp2(tl.ceil(tl.log2(largest)) - 8.0)  # sums of 2 ** 8 times 448 in float32
    tl.store(scaled + row * width + column, (values / factor).to(tl.float16), mask=inside)
    tl.store(factors + row, factor)


@triton.jit
def dequantise_kernel(
    weight, scale, out, depth, scale_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
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
def add_product(acc, a, weights, scales, GROUPED: tl.constexpr):
    """acc + a @ weights.T; with GROUPED the product is scaled before the sum."""
    if GROUPED:
        acc += tl.dot(a, tl.trans(weights.to(a.dtype))) * tl.load(scales)[None, :]
    else:
        acc = tl.dot(a, tl.trans(weights.to(a.dtype)), acc)
    return acc


@triton.jit
def linear_fp8_kernel(
    scaled, factors, weight, scale, bias, residual, out, rows, columns, depth, scale_stride, residual_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = x @ (weight * scale).T + bias + residual of x as `scaled_kernel` leaves it: scaled [ROWS, depth], of which
    `rows` count; one program per block of COLUMNS. GROUP: input columns that share a scale, 0 for all of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = scaled + row[:, None] * depth + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(a_rows + k, live, MASKED)
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        acc = add_product(acc, a, w, at, GROUP > 0)
    result = acc * tl.load(factors + row, mask=live, other=0.0)[:, None]
    if GROUP == 0:
        result *= tl.load(scale + safe)[None, :]
    mask = live[:, None] & (column < columns)[None, :]
    if bias is not None:
        result += tl.load(bias + safe)[None, :].to(tl.float32)
    if residual is not None:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        at = residual + row[:, None] * residual_stride + column[None, :]
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_fp8_kernel(
    scaled, factors, weight, scale, bias, out, rows, columns, depth, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up with gate, up = x @ (weight * scale).T; `columns` are those of out."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_bytes(weight, safe + columns, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    a_rows = scaled + row[:, None] * depth + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(a_rows + k, live, MASKED)
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        w = tl.load(gate_rows + k, eviction_policy="evict_first")
        gate = add_product(gate, a, w, at, GROUP > 0)
        w = tl.load(up_rows + k, eviction_policy="evict_first")
        up = add_product(up, a, w, at + columns, GROUP > 0)
    factor = tl.load(factors + row, mask=live, other=0.0)[:, None]
    left = gate * factor
    right = up * factor
    if GROUP == 0:
        left *= tl.load(scale + safe)[None, :]
        right *= tl.load(scale + columns + safe)[None, :]
    if bias is not None:
        left += tl.load(bias + safe)[None, :].to(tl.float32)
        right += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    left = left.to(out.dtype.element_ty).to(tl.float32)
    right = right.to(out.dtype.element_ty).to(tl.float32)
    result = left * tl.sigmoid(left) * right
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)

# type: ignore  (what Triton compiles is not what a type checker reads)
"""Linears that read FP8 weights (e4m3) and multiply in the dtype of the activations.

With WEIGHTS_FIRST they are the first operand of each product, [COLUMNS, DEPTH] x [DEPTH, ROWS]: tensor cores of recent
GPUs take a first operand from registers, where weights are converted. Programs of one block of weights and several
blocks of rows follow each other, so that the weights are read once from memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_bytes(weight, columns, depth, PREFETCH: tl.constexpr):
    """Addresses (int64) of the cache lines of the first PREFETCH input columns of these rows of `weight`."""
    lines = tl.arange(0, PREFETCH // 128) * 128
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def add_product(acc, a, weights, scales, WEIGHTS_FIRST: tl.constexpr, GROUPED: tl.constexpr):
    """acc [ROWS, COLUMNS] + a @ weights.T, or both transposed; with GROUPED the product is scaled before the sum."""
    w = weights.to(a.dtype)
    if WEIGHTS_FIRST:
        if GROUPED:
            acc += tl.dot(w, tl.trans(a)) * tl.load(scales)[:, None]
        else:
            acc = tl.dot(w, tl.trans(a), acc)
    else:
        if GROUPED:
            acc += tl.dot(a, tl.trans(w)) * tl.load(scales)[None, :]
        else:
            acc = tl.dot(a, tl.trans(w), acc)
    return acc


@triton.jit
def linear_fp8_kernel(
    x, weight, scale, bias, residual, out, rows, columns, depth, x_stride, scale_stride, residual_stride,
    BIASED: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = x @ (weight * scale).T + bias + residual; GROUP: input columns that share a scale, 0 for all of them."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_bytes(weight, safe, depth, PREFETCH), START=False)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((COLUMNS, ROWS) if WEIGHTS_FIRST else (ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        acc = add_product(acc, a, w, at, WEIGHTS_FIRST, GROUP > 0)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if GROUP == 0:
        acc *= tl.load(scale + safe)[None, :]
    mask = live[:, None] & (column < columns)[None, :]
    if BIASED:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_fp8_kernel(
    x, weight, scale, bias, out, rows, columns, depth, x_stride, scale_stride,
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
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((COLUMNS, ROWS) if WEIGHTS_FIRST else (ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if WEIGHTS_FIRST else (ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        at = scale + (k // GROUP if GROUP else 0) * scale_stride + safe
        w = tl.load(gate_rows + k, eviction_policy="evict_first")
        gate = add_product(gate, a, w, at, WEIGHTS_FIRST, GROUP > 0)
        w = tl.load(up_rows + k, eviction_policy="evict_first")
        up = add_product(up, a, w, at + columns, WEIGHTS_FIRST, GROUP > 0)
    if WEIGHTS_FIRST:
        gate = tl.trans(gate)
        up = tl.trans(up)
    if GROUP == 0:
        gate *= tl.load(scale + safe)[None, :]
        up *= tl.load(scale + columns + safe)[None, :]
    if BIASED:
        gate += tl.load(bias + safe)[None, :].to(tl.float32)
        up += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)

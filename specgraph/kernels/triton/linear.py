# type: ignore  (what Triton compiles is not what a type checker reads)
"""Linears of few rows, with residual, activation or argmax in their epilogue.

With the few rows of a draft step a linear takes the time that reading its weights takes, so whatever needs only its
output is done in its epilogue. The norm before it is a kernel of its own: scaling rows inside the loop takes the
operand out of the copy pipeline, which cost 4 to 30 us on an H200. The small kernel costs 2, during which the linear
prefetches its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_lines(weight, columns, depth, PREFETCH: tl.constexpr):
    """Addresses (int64) of the cache lines of the first PREFETCH input columns of these rows of `weight`."""
    lines = tl.arange(0, PREFETCH // 64) * 64
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def linear_kernel(
    x, weight, bias, residual, out, rows, columns, depth, x_stride, residual_stride,
    BIASED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T + bias + residual."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(first_lines(weight, safe, depth, PREFETCH))
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        acc = tl.dot(a, tl.trans(tl.load(w_rows + k, eviction_policy="evict_first")), acc)
    mask = live[:, None] & (column < columns)[None, :]
    if BIASED:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_kernel(
    x, weight, bias, out, rows, columns, depth, x_stride,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up with gate, up = x @ weight.T; `columns` are those of out."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        gate_lines = first_lines(weight, safe, depth, PREFETCH)
        OVERLAP(gate_lines, first_lines(weight, safe + columns, depth, PREFETCH))
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        gate = tl.dot(a, tl.trans(tl.load(gate_rows + k, eviction_policy="evict_first")), gate)
        up = tl.dot(a, tl.trans(tl.load(up_rows + k, eviction_policy="evict_first")), up)
    if BIASED:
        gate += tl.load(bias + safe)[None, :].to(tl.float32)
        up += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def head_kernel(
    x, weight, best_value, best_index, rows, columns, depth, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """The largest logit of each block of columns, and where it is: best_value, best_index [blocks, rows].

    Logits are rounded to the model's dtype before they are compared, as if they had been stored.
    """
    block = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(first_lines(weight, safe, depth, PREFETCH))
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        acc = tl.dot(a, tl.trans(tl.load(w_rows + k, eviction_policy="evict_first")), acc)
    logits = acc.to(x.dtype.element_ty).to(tl.float32)
    # A NaN never wins (it differs from itself): a padded row of garbage still gives a token that exists.
    logits = tl.where((column < columns)[None, :] & (logits == logits), logits, float("-inf"))
    value, index = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + block * rows + row, value, mask=live)
    tl.store(best_index + block * rows + row, block * COLUMNS + index, mask=live)


@triton.jit
def best_kernel(logits, best_value, best_index, rows, columns, stride, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """As `head_kernel`, of logits that exist. One program per block of columns and row."""
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row.to(tl.int64) * stride + column
    value = tl.load(at, mask=column < columns, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # as in `head_kernel`
    best, index = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + block * rows + row, best)
    tl.store(best_index + block * rows + row, block * COLUMNS + index)


@triton.jit
def best_token(best_value, best_index, draft_to_target, row, blocks, rows, MAPPED: tl.constexpr, BLOCKS: tl.constexpr):
    """The best block's token of one row, the lowest id among equals, in the target's vocabulary."""
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    value = tl.load(best_value + block * rows + row, mask=known, other=float("-inf"))
    index = tl.load(best_index + block * rows + row, mask=known, other=2147483647)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, index, 2147483647), axis=0).to(tl.int64)
    if MAPPED:
        token += tl.load(draft_to_target + token)
    return token


@triton.jit
def finish_greedy_kernel(
    best_value, best_index, draft_to_target, draft_step, token_ids, draft_token_ids, blocks, rows, draft_stride,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row: its token to the next step's input and to column `draft_step` of the result."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0)
    token = best_token(best_value, best_index, draft_to_target, row, blocks, rows, MAPPED, BLOCKS)
    tl.store(token_ids + row, token)
    tl.store(draft_token_ids + row * draft_stride + tl.load(draft_step), token)


@triton.jit
def finish_block_kernel(
    best_value, best_index, draft_to_target, draft_token_ids, blocks, rows, steps, draft_stride,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row: row i is column i % steps of request i // steps."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0)
    token = best_token(best_value, best_index, draft_to_target, row, blocks, rows, MAPPED, BLOCKS)
    tl.store(draft_token_ids + (row // steps) * draft_stride + row % steps, token)


@triton.jit
def gate_kernel(packed, out, columns, packed_stride, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """out [rows, columns] = silu(gate) * up of rows (gate | up); one program per row and COLUMNS of them."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = packed + row * packed_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)

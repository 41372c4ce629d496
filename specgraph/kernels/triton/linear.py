"""Linears of few rows: the weights stream through once, everything around them rides along.

At the rows of a draft step a linear's time is its weights over the memory bandwidth, so norms, activations, residuals
and the argmax over a vocabulary are done by the linear that reads or makes their operand. A norm costs no pass of its
own: rows are scaled after the product, because the root mean square is one number a row, and the squares are summed
while the row streams by.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.triton.launch import prefetch_lines, start_next, wait_previous


@triton.jit
def prefetch_weights(weight, columns, depth, PREFETCH: tl.constexpr):
    """Ask for the first PREFETCH input columns of these rows of `weight`."""
    lines = tl.arange(0, PREFETCH // 64) * 64
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    prefetch_lines(address.to(tl.int64, bitcast=True))


@triton.jit
def stream(x, norm, w, begin, end, live, acc, ROWS: tl.constexpr, DEPTH: tl.constexpr, NORMED: tl.constexpr):
    """acc + (x * norm) @ w.T over input columns begin..end, and each row's sum of squares.

    x, w: pointers to column 0 of each row, [ROWS, 1] and [COLUMNS, 1].
    """
    inner = tl.arange(0, DEPTH)[None, :]
    squares = tl.zeros((ROWS, DEPTH), tl.float32)
    for k in range(begin, end, DEPTH):
        a = tl.load(x + (k + inner), mask=live[:, None], other=0.0)
        b = tl.load(w + (k + inner), eviction_policy="evict_first")
        if NORMED:
            wide = a.to(tl.float32)
            squares += wide * wide
            a = (wide * tl.load(norm + (k + inner)).to(tl.float32)).to(a.dtype)
        acc = tl.dot(a, tl.trans(b), acc)
    return acc, tl.sum(squares, axis=1)


@triton.jit
def linear_kernel(
    x, norm, weight, bias, residual, out, rows, columns, depth, x_stride, residual_stride, eps,
    NORMED: tl.constexpr, BIASED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = norm(x) @ weight.T + bias + residual."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP:
        start_next()
        prefetch_weights(weight, safe, depth, PREFETCH)
        wait_previous()
    row = tl.arange(0, ROWS)
    live = row < rows
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc, squares = stream(
        x + row[:, None] * x_stride, norm, weight + safe.to(tl.int64)[:, None] * depth, 0, depth, live, acc,
        ROWS, DEPTH, NORMED,
    )  # fmt: skip
    if NORMED:
        acc *= tl.rsqrt(squares / depth + eps)[:, None]
    mask = live[:, None] & (column < columns)[None, :]
    if BIASED:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def pair_linear_kernel(
    token_ids, table, table_norm, hidden, hidden_norm, weight, bias, out, rows, columns, width, hidden_width,
    hidden_stride, eps, BIASED: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = cat(norm(table[token_ids]), norm(hidden)) @ weight.T + bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    depth = width + hidden_width
    if OVERLAP:
        start_next()
        prefetch_weights(weight, safe, depth, PREFETCH)
        wait_previous()
    row = tl.arange(0, ROWS)
    live = row < rows
    token = tl.load(token_ids + row, mask=live, other=0)
    w = weight + safe.to(tl.int64)[:, None] * depth
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc, squares = stream(table + token[:, None] * width, table_norm, w, 0, width, live, acc, ROWS, DEPTH, NORMED)
    if NORMED:
        # The first half's scale over the second's: the second half's scale is applied to both at the end.
        first = tl.rsqrt(squares / width + eps)
        acc *= first[:, None]
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    second, squares = stream(
        hidden + row[:, None] * hidden_stride,
        hidden_norm,
        w + width,
        0,
        hidden_width,
        live,
        second,
        ROWS,
        DEPTH,
        NORMED,
    )
    if NORMED:
        second *= tl.rsqrt(squares / hidden_width + eps)[:, None]
    acc += second
    if BIASED:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_kernel(
    x, norm, weight, bias, out, rows, columns, depth, x_stride, eps,
    NORMED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up with gate, up = norm(x) @ weight.T; `columns` are those of out."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP:
        start_next()
        prefetch_weights(weight, safe, depth, PREFETCH)
        prefetch_weights(weight, safe + columns, depth, PREFETCH)
        wait_previous()
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x + row[:, None] * x_stride
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, DEPTH), tl.float32)
    for k in range(0, depth, DEPTH):
        a = tl.load(x_rows + (k + inner), mask=live[:, None], other=0.0)
        g = tl.load(gate_rows + (k + inner), eviction_policy="evict_first")
        u = tl.load(up_rows + (k + inner), eviction_policy="evict_first")
        if NORMED:
            wide = a.to(tl.float32)
            squares += wide * wide
            a = (wide * tl.load(norm + (k + inner)).to(tl.float32)).to(a.dtype)
        gate = tl.dot(a, tl.trans(g), gate)
        up = tl.dot(a, tl.trans(u), up)
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / depth + eps)[:, None]
        gate *= scale
        up *= scale
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
    x, norm, weight, best_value, best_index, rows, columns, depth, x_stride, eps,
    NORMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """The largest logit of each block of columns, and where it is: best_value, best_index [blocks, rows].

    Logits are rounded to the model's dtype before they are compared, as if they had been stored.
    """
    block = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP:
        start_next()
        prefetch_weights(weight, safe, depth, PREFETCH)
        wait_previous()
    row = tl.arange(0, ROWS)
    live = row < rows
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc, squares = stream(
        x + row[:, None] * x_stride, norm, weight + safe.to(tl.int64)[:, None] * depth, 0, depth, live, acc,
        ROWS, DEPTH, NORMED,
    )  # fmt: skip
    if NORMED:
        acc *= tl.rsqrt(squares / depth + eps)[:, None]
    logits = acc.to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where((column < columns)[None, :], logits, float("-inf"))
    value, index = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + block * rows + row, value, mask=live)
    tl.store(best_index + block * rows + row, block * COLUMNS + index, mask=live)


@triton.jit
def best_kernel(
    logits, best_value, best_index, rows, columns, stride, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr
):
    """As `head_kernel`, of logits that exist. One program a block of columns and a row."""
    if OVERLAP:
        start_next()
        wait_previous()
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row.to(tl.int64) * stride + column
    value = tl.load(at, mask=column < columns, other=float("-inf")).to(tl.float32)
    best, index = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + block * rows + row, best)
    tl.store(best_index + block * rows + row, block * COLUMNS + index)


@triton.jit
def finish_greedy_kernel(
    best_value, best_index, draft_to_target, draft_step, token_ids, draft_token_ids, blocks, rows, draft_stride,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: the best block's token, the lowest id among equals, mapped and written where it belongs."""
    if OVERLAP:
        start_next()
        wait_previous()
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    value = tl.load(best_value + block * rows + row, mask=known, other=float("-inf"))
    index = tl.load(best_index + block * rows + row, mask=known, other=2147483647)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, index, 2147483647), axis=0).to(tl.int64)
    if MAPPED:
        token += tl.load(draft_to_target + token)
    tl.store(token_ids + row, token)
    tl.store(draft_token_ids + row * draft_stride + tl.load(draft_step), token)

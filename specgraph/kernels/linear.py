# type: ignore  (what Triton compiles is not what a type checker reads)
"""Linears of few rows, with residual, activation or argmax in their epilogue.

With the few rows of a draft step a linear takes the time that reading its weights takes, so whatever needs only its
output is done in its epilogue. So is what a norm before the next linear needs, see `linear_kernel`. Any other norm is a
kernel of its own: scaling rows inside the loop takes the operand out of the copy pipeline, which costs more than the
small kernel, during which the linear prefetches its weights. A backend says what it measured beside its tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.sampling import best_by_gumbel, best_of, real_numbers, scaled


@triton.jit
def first_lines(weight, columns, depth, PREFETCH: tl.constexpr):
    """Addresses (int64) of the cache lines of the first PREFETCH input columns of these rows of `weight`."""
    lines = tl.arange(0, PREFETCH // 64) * 64
    address = weight + columns.to(tl.int64)[:, None] * depth + lines[None, :]
    return address.to(tl.int64, bitcast=True)


@triton.jit
def x_row_starts(x, weight, taken, row, rows, columns, depth, x_stride, MASKED: tl.constexpr):
    """Addresses [ROWS] of the rows `taken` of x; without a mask, rows of the tile after the last are rows of `weight`.

    Their products are not stored. Under a mask a loop has a select for each copy, which it may wait for. Rows of the
    weight are other programs' lines too, and, unlike x's last row again, not the same line for all.
    """
    start = x + taken * x_stride
    if not MASKED:
        start = tl.where(row < rows, start, weight + tl.minimum(row, columns - 1) * depth)
    return start


@triton.jit
def load_rows(at, live, MASKED: tl.constexpr):
    """x at the addresses `at` [ROWS, DEPTH]; under a mask, zeros in rows that are not `live` [ROWS]."""
    return tl.load(at, mask=live[:, None] if MASKED else None, other=0.0 if MASKED else None)


@triton.jit
def load_squares(squares, row, live, parts, PARTS: tl.constexpr):
    """squares [rows, parts], whose sums over parts are those of each row's squared elements: [ROWS, PARTS]."""
    part = tl.arange(0, PARTS)
    return tl.load(
        squares + row[:, None] * parts + part[None, :], mask=live[:, None] & (part < parts)[None, :], other=0.0
    )


@triton.jit
def linear_kernel(
    x, weight, bias, residual, out, norm, scaled_out, squares_out, squares, rows, columns, depth, x_stride,
    residual_stride, parts, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T + bias + residual.

    Between two linears rows are normalised in parts. With `norm`, this is the first: scaled_out = out * norm, and
    squares_out [rows, programs] has the sums of the squares of each program's columns of out. With `squares`
    [rows, parts], this is the second: x is such a scaled_out, and rows are divided by their root mean square after
    the product.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x_row_starts(x, weight, row, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if squares is not None:
        square = load_squares(squares, row, live, parts, PARTS)
        if ROWS > 16:  # too many to hold until the product is there
            square = tl.sum(square, axis=1, keep_dims=True)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        acc = tl.dot(a, tl.trans(tl.load(w_rows + k, eviction_policy="evict_first")), acc)
    if squares is not None:
        acc *= tl.rsqrt(tl.sum(square, axis=1) / depth + eps)[:, None]
    mask = live[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    if bias is not None:
        acc += tl.load(bias + safe)[None, :].to(tl.float32)
    if residual is not None:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=mask)
    if norm is not None:
        total = tl.where(mask, result.to(tl.float32), 0.0)
        weighted = total * tl.load(norm + safe)[None, :].to(tl.float32)
        tl.store(scaled_out + at, weighted.to(out.dtype.element_ty), mask=mask)
        to = squares_out + row * tl.num_programs(0) + tl.program_id(0)
        tl.store(to, tl.sum(total * total, axis=1), mask=live)


@triton.jit
def gate_up_kernel(
    x, weight, bias, out, squares, rows, columns, depth, x_stride, parts, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up with gate, up = x @ weight.T; `columns` are those of out; squares as in `linear_kernel`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_lines(weight, safe + columns, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = x_row_starts(x, weight, row, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    gate_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    up_rows = gate_rows + tl.cast(columns, tl.int64) * depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    if squares is not None:
        square = load_squares(squares, row, live, parts, PARTS)
        if ROWS > 16:
            square = tl.sum(square, axis=1, keep_dims=True)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        gate = tl.dot(a, tl.trans(tl.load(gate_rows + k, eviction_policy="evict_first")), gate)
        up = tl.dot(a, tl.trans(tl.load(up_rows + k, eviction_policy="evict_first")), up)
    if squares is not None:
        factor = tl.rsqrt(tl.sum(square, axis=1) / depth + eps)[:, None]
        gate *= factor
        up *= factor
    if bias is not None:
        gate += tl.load(bias + safe)[None, :].to(tl.float32)
        up += tl.load(bias + columns + safe)[None, :].to(tl.float32)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    mask = live[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def head_kernel(
    x, weight, added, row_ids, logits, best_value, best_index, tops, totals, temperature, seeds, first_position,
    more_positions, draft_step, draft_column, rows, columns, depth, x_stride, added_stride, row_ids_stride, blocks,
    TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Per block of columns of x[row_ids] @ weight.T + added, the best logit and its column: best_value, best_index
    [rows, blocks].

    Logits are rounded to the model's dtype before they are compared, as if they had been stored. With a temperature,
    logits [rows, columns] are stored, and best_value, best_index, tops, totals are what `best_by_gumbel` returns.
    `draft_column` gets the value of `draft_step`, for a kernel that writes it. With a TURN other launches read the same
    weight: 0 from its first block on, 1 from its last.
    """
    block = tl.program_id(0)
    if TURN == 1:
        block = tl.num_programs(0) - 1 - block
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    inside = (column < columns)[None, :]
    taken = row
    if row_ids is not None:
        taken = tl.load(row_ids + row * row_ids_stride, mask=live, other=0)
    if added is not None:
        at = added + row.to(tl.int64)[:, None] * added_stride + column[None, :]
        more = tl.load(at, mask=live[:, None] & inside, other=0.0)
    x_rows = x_row_starts(x, weight, taken, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    if draft_column is not None:
        tl.store(draft_column, tl.load(draft_step, mask=block == 0, other=0), mask=block == 0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        w = tl.load(w_rows + k, eviction_policy="evict_first" if TURN is None else "")
        acc = tl.dot(a, tl.trans(w), acc)
    rounded = acc.to(x.dtype.element_ty)
    if added is not None:
        rounded = (rounded.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
    scores = real_numbers(rounded.to(tl.float32), inside)
    if temperature is not None:
        at = logits + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(at, rounded, mask=live[:, None] & inside)
        warmth = tl.load(temperature + row, mask=live, other=0.0)
        position = tl.load(first_position + row, mask=live, other=0).to(tl.int64) + 1
        if more_positions is not None:
            position += tl.load(more_positions + row, mask=live, other=0)
        seed = tl.load(seeds + row, mask=live, other=0)
        value, index, top, total = best_by_gumbel(scaled(scores, warmth), warmth, seed, position, column)
        tl.store(tops + row * blocks + block, top, mask=live)
        tl.store(totals + row * blocks + block, total, mask=live)
    else:
        value, index = best_of(scores)
    tl.store(best_value + row * blocks + block, value, mask=live)
    tl.store(best_index + row * blocks + block, block * COLUMNS + index, mask=live)


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


@triton.jit
def add_parts_kernel(
    parts, residual, out, norm, normed, rows, columns, residual_stride, eps, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = the sum of parts [SPLIT, rows, columns], rounded, plus residual; one program per row.

    The parts are added in float32, in order. With `norm`, normed [rows, columns] = rms_norm(out).
    """
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    if norm is not None:  # a weight, which the kernels that may still run do not write
        scale = tl.load(norm + column, mask=inside, other=0.0)
    if OVERLAP is not None:
        OVERLAP(START=False)
    if residual is not None:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(parts + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + (part * rows + row) * columns + column, mask=inside, other=0.0)
    rounded = total.to(out.dtype.element_ty)
    if residual is not None:
        rounded = (rounded.to(tl.float32) + more).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, rounded, mask=inside)
    if norm is not None:
        wide = rounded.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
        wide *= scale.to(tl.float32)
        tl.store(normed + row * columns + column, wide.to(out.dtype.element_ty), mask=inside)

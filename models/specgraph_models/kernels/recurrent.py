"""Triton kernels of a recurrent state that follows the drawn tokens, and of the linear that reads it."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import ceil_div, contiguous_rows, tile_rows
from specgraph.kernels.linear import HALVES, MAX_ROWS, first_lines, load_rows
from specgraph.ops.linear import Weight
from specgraph_models.kernels.candidates import CandidateOps

_STATE_COLUMNS = 8
"""Columns of the state per program: with 1024 of them, about as many programs as a GPU has multiprocessors."""
_STATE_DEPTH = 256
"""Input columns per block of the state's products. Of seven tiles this was the fastest with 1 and 8 requests."""
_SUM_DEPTH = 128
"""Input columns per block of `silu_of_sum`."""
_SHARED = 96 << 10
"""Bytes of shared memory for the blocks that are loaded ahead: what every GPU with the kernels has."""


@triton.jit
def state_kernel(
    token_ids, table, state, taken, kept, out, rows, size, depth, token_stride, table_stride, state_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the next state of all rows, one program per COLUMNS columns of the state.

    A tile of the weights has COLUMNS rows of each of the three gates, and as many that are not loaded.
    """
    lane = tl.arange(0, 4 * COLUMNS)
    column = tl.program_id(0) * COLUMNS + lane % COLUMNS
    loaded = (lane < 3 * COLUMNS) & (column < size)
    weight_row = tl.where(loaded, lane // COLUMNS * size + column, 0)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(taken, weight_row, depth, PREFETCH), START=False, WAIT=False)
        OVERLAP(first_lines(kept, weight_row, size, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    token = tl.load(token_ids + row * token_stride, mask=live, other=0)
    x_rows = (table + token * table_stride)[:, None] + inner
    w_rows = taken + weight_row.to(tl.int64)[:, None] * depth + inner
    of_token = tl.zeros((ROWS, 4 * COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        w = tl.load(w_rows + k, mask=loaded[:, None], other=0.0)
        of_token = tl.dot(load_rows(x_rows + k, live, True), tl.trans(w), of_token)
    x_rows = (state + row * state_stride)[:, None] + inner
    w_rows = kept + weight_row.to(tl.int64)[:, None] * size + inner
    of_state = tl.zeros((ROWS, 4 * COLUMNS), tl.float32)
    for k in range(0, size, DEPTH):
        w = tl.load(w_rows + k, mask=loaded[:, None], other=0.0)
        of_state = tl.dot(load_rows(x_rows + k, live, True), tl.trans(w), of_state)

    gate = tl.arange(0, 4)[None, :, None]
    t = tl.reshape(of_token, (ROWS, 4, COLUMNS))
    s = tl.reshape(of_state, (ROWS, 4, COLUMNS))
    reset = tl.sigmoid(tl.sum(tl.where(gate == 0, t + s, 0.0), axis=1))
    update = tl.sigmoid(tl.sum(tl.where(gate == 1, t + s, 0.0), axis=1))
    added = tl.sum(tl.where(gate == 2, t, 0.0), axis=1) + reset * tl.sum(tl.where(gate == 2, s, 0.0), axis=1)
    new = 2.0 * tl.sigmoid(2.0 * added) - 1.0  # tanh
    own = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = live[:, None] & (own < size)[None, :]
    old = tl.load(state + row[:, None] * state_stride + own[None, :], mask=mask, other=0.0).to(tl.float32)
    result = new + update * (old - new)
    tl.store(out + row[:, None] * size + own[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_of_sum_kernel(
    x, weight, added, out, rows, columns, depth, x_stride, weight_stride, added_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out = silu(x @ weight.T + added), one program per COLUMNS columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, weight_stride, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    x_rows = (x + row * x_stride)[:, None] + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * weight_stride + inner
    mask = live[:, None] & (column < columns)[None, :]
    more = tl.load(added + row[:, None] * added_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        total = tl.dot(load_rows(x_rows + k, live, True), tl.trans(tl.load(w_rows + k)), total)
    total += more
    result = total * tl.sigmoid(total)
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=mask)


class RecurrentOps(CandidateOps):
    """Implementations of `next_state` and `silu_of_sum`."""

    __slots__ = ()

    def next_state(self, token_ids: Tensor, table: Tensor, state: Tensor, taken: Weight, kept: Weight) -> Tensor:
        matrices = taken.matrix, kept.matrix
        (rows, size), depth = state.shape, taken.matrix.shape[1]
        plain = all(part is None for weight in (taken, kept) for part in (weight.bias, weight.scale))
        contiguous = all(matrix.is_contiguous() for matrix in matrices) and table.stride(1) == 1
        if not plain or not contiguous or not _fits(state, _STATE_DEPTH, size, depth):
            return NotImplemented
        state, out = contiguous_rows(state), state.new_empty(state.shape)
        stage = 2 * _STATE_DEPTH * (4 * _STATE_COLUMNS + tile_rows(rows))  # bytes
        self.launch(
            state_kernel, (ceil_div(size, _STATE_COLUMNS),),
            token_ids, table, state, *matrices, out, rows, size, depth, token_ids.stride(0), table.stride(0),
            state.stride(0), ROWS=tile_rows(rows), COLUMNS=_STATE_COLUMNS, DEPTH=_STATE_DEPTH,
            PREFETCH=1024 if min(size, depth) >= 1024 else _STATE_DEPTH, num_warps=2, num_stages=_SHARED // stage + 1,
        )  # fmt: skip
        return out

    def silu_of_sum(self, x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        (rows, depth), columns = x.shape, weight.shape[0]
        if weight.stride(1) != 1 or not _fits(x, _SUM_DEPTH, depth):
            return NotImplemented
        x, added = contiguous_rows(x), contiguous_rows(added)
        out = x.new_empty(rows, columns)
        self.launch(
            silu_of_sum_kernel, (ceil_div(columns, 16),),
            x, weight, added, out, rows, columns, depth, x.stride(0), weight.stride(0), added.stride(0),
            ROWS=tile_rows(rows), COLUMNS=16, DEPTH=_SUM_DEPTH, PREFETCH=_SUM_DEPTH, num_warps=2, num_stages=4,
        )  # fmt: skip
        return out


def _fits(x: Tensor, block: int, *depths: int) -> bool:
    """Return whether the kernels take rows like x [R, in], and products over `depths` columns in whole blocks."""
    return 0 < x.shape[0] <= MAX_ROWS and x.dtype in HALVES and all(depth % block == 0 for depth in depths)

"""Kernels for a drafter with one module per draft step: they keep past rows, and shift tokens for the next module."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, contiguous_rows, power_of_two
from specgraph.ops.past_rows import PastRows

STATE_CHUNK = 2048
"""Elements of a hidden state that a program moves at a time."""


@triton.jit
def keep_rows_kernel(
    token_ids, hidden, positions, slot_mapping, past_token_ids, past_positions, past_hidden, rows, size, hidden_stride,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row. The row is kept if no later row takes its entry."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    block = slot // BLOCK
    later = tl.load(slot_mapping + row + KEPT, mask=row + KEPT < rows, other=-1)
    if (slot >= 0) & ((later < 0) | (later // BLOCK != block)):
        entry = block * KEPT + slot % BLOCK % KEPT
        tl.store(past_token_ids + entry, tl.load(token_ids + row))
        tl.store(past_positions + entry, tl.load(positions + row))
        for first in range(0, size, CHUNK):
            element = first + tl.arange(0, CHUNK)
            there = element < size
            state = tl.load(hidden + row * hidden_stride + element, mask=there)
            tl.store(past_hidden + entry * size + element, state, mask=there)


@triton.jit
def shift_token_ids_kernel(
    token_ids, last_rows, latest, seq_lens, draft_step, rows, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program per request. WIDTH is a power of two that holds its rows."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, WIDTH)
    inside = offset < rows
    at = token_ids + request * rows
    last = tl.load(last_rows + request) - request * rows
    following = tl.load(at + tl.minimum(offset + 1, rows - 1), mask=inside, other=0)
    shifted = tl.where(offset == last, tl.load(latest + request), following)
    tl.debug_barrier()  # a store may be to a row that another thread loads
    tl.store(at + offset, shifted, mask=inside)
    length = tl.load(seq_lens + request)
    tl.store(seq_lens + request, length + (length > 0).to(tl.int32))
    if request == 0:
        tl.store(draft_step, tl.load(draft_step) + 1)


class PastRowsOps(Launcher):
    """Implementations of `specgraph.ops.keep_rows` and `specgraph.ops.shift_token_ids`."""

    __slots__ = ()

    def keep_rows(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, slot_mapping: Tensor, past: PastRows,
        block_size: int,
    ) -> None:  # fmt: skip
        hidden, size = contiguous_rows(hidden), hidden.shape[1]
        self.launch(
            keep_rows_kernel, (token_ids.shape[0],),
            token_ids.contiguous(), hidden, positions.contiguous(), slot_mapping.contiguous(), *past,
            token_ids.shape[0], size, hidden.stride(0), KEPT=past.positions.shape[1], BLOCK=block_size,
            CHUNK=min(STATE_CHUNK, power_of_two(size)), num_warps=4,
        )  # fmt: skip

    def shift_token_ids(
        self, token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor
    ) -> None:
        if not all(tensor.is_contiguous() for tensor in (token_ids, last_rows, latest, seq_lens)):
            return NotImplemented
        rows = token_ids.shape[0] // last_rows.shape[0]
        self.launch(
            shift_token_ids_kernel, (last_rows.shape[0],),
            token_ids, last_rows, latest, seq_lens, draft_step, rows, WIDTH=power_of_two(rows), num_warps=1,
        )  # fmt: skip

# type: ignore  (what Triton compiles is not what a type checker reads)
"""Rows of a drafter with one module per step: past rows, the round's rows, and their tokens from module to module."""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.ops.triton.begin import count_rows_without_block, slots_of


@triton.jit
def begin_modules_kernel(
    sampled_token_ids, num_sampled, start_positions, block_table, round_hidden, past_token_ids, past_positions,
    past_hidden, token_ids, hidden, positions, slot_mapping, seq_lens, last_rows, step_seq_lens, draft_step,
    rows_without_block, query_len, past, size, sampled_stride, hidden_stride, table_stride, table_width, max_model_len,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (request, row): one of the `past` + query_len rows of a request. WIDTH is a power of two, at least both
    numbers."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    rows = query_len + past
    count = tl.load(num_sampled + request)
    start = tl.load(start_positions + request)
    live = count > 0
    table = block_table + request * table_stride
    begin = tl.maximum(start - past, 0)
    position = begin + row
    column = position - start  # of the round; less than 0 for a past row

    # A past row is found if its entry and those of all after it hold their positions.
    offset = tl.arange(0, WIDTH)
    after = position + offset
    inside = live & (after < start)
    block = tl.load(table + tl.minimum(after // BLOCK, table_width - 1), mask=inside, other=0).to(tl.int64)
    holds = tl.load(past_positions + block * KEPT + after % BLOCK % KEPT, mask=inside, other=-1)
    missing = tl.sum((inside & ((holds != after) | (block == 0))).to(tl.int32), 0)
    found = live & (column < 0) & (missing == 0)
    known = live & (column >= 0) & (column < count)

    slot = slots_of(position, table, found | known, table_stride, table_width, max_model_len, BLOCK)
    own = tl.load(table + tl.minimum(position // BLOCK, table_width - 1), mask=found, other=0).to(tl.int64)
    entry = own * KEPT + position % BLOCK % KEPT
    kept = tl.load(past_token_ids + entry, mask=found, other=0)
    sampled = tl.load(sampled_token_ids + request * sampled_stride + column, mask=known, other=0)
    at = request * rows + row
    tl.store(token_ids + at, tl.where(found, kept, sampled))
    tl.store(positions + at, tl.minimum(tl.where(live, position, 0), max_model_len - 1))
    tl.store(slot_mapping + at, slot)
    for first in range(0, size, CHUNK):
        element = first + tl.arange(0, CHUNK)
        there = element < size
        old = tl.load(past_hidden + entry * size + element, mask=there & found, other=0.0)
        line = request * query_len + column
        new = tl.load(round_hidden + line * hidden_stride + element, mask=there & known, other=0.0)
        tl.store(hidden + at * size + element, tl.where(found, old, new), mask=there)
    if row == 0:
        tl.store(seq_lens + request, tl.where(live, begin + rows, 0).to(tl.int32))
        tl.store(last_rows + request, request * rows + tl.maximum(start - begin + count - 1, 0))
        tl.store(step_seq_lens + request, tl.where(live, start + count, 0).to(tl.int32))
        if request == 0:
            tl.store(draft_step, tl.zeros((), tl.int64))
        if rows_without_block is not None:
            count_rows_without_block(
                rows_without_block, start, tl.where(live, count, 0), table, table_width, max_model_len, BLOCK, WIDTH
            )


@triton.jit
def keep_rows_kernel(
    token_ids, hidden, positions, slot_mapping, past_token_ids, past_positions, past_hidden, rows, size, hidden_stride,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row: it is kept if no later row takes its entry."""
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
    tl.debug_barrier()  # all loads before the stores, which are of other threads' rows
    tl.store(at + offset, shifted, mask=inside)
    length = tl.load(seq_lens + request)
    tl.store(seq_lens + request, length + (length > 0).to(tl.int32))
    if request == 0:
        tl.store(draft_step, tl.load(draft_step) + 1)

# type: ignore  (what Triton compiles is not what a type checker reads)
"""The first node of each captured pass, and moving one token on: rows, positions, lengths and KV slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(position, block_table, valid, table_stride, table_width, max_model_len, BLOCK: tl.constexpr):
    """KV slots of unclamped positions of one request: -1 where not valid, past the end, or in the null block."""
    inside = valid & (position < max_model_len) & (position >= 0)
    index = tl.minimum(tl.minimum(tl.maximum(position, 0), max_model_len - 1) // BLOCK, table_width - 1)
    block = tl.load(block_table + index, mask=inside, other=0).to(tl.int64)
    return tl.where(inside & (block != 0), block * BLOCK + position % BLOCK, -1)


@triton.jit
def store_places(
    at, raw, known, kept, inside, positions, slot_mapping, table, table_stride, table_width, max_model_len,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions and KV slots of the rows `at` of one request, which are at unclamped positions `raw`.

    Rows that are not `known` have position 0, and those that are not `kept` no slot; `inside` masks what is written.
    """
    clamped = tl.minimum(tl.maximum(tl.where(known, raw, 0), 0), max_model_len - 1)
    tl.store(positions + at, clamped, mask=inside)
    slot = slots_of(raw, table, kept & inside, table_stride, table_width, max_model_len, BLOCK)
    tl.store(slot_mapping + at, slot, mask=inside)


@triton.jit
def count_rows_without_block(
    rows_without_block, start, count, table, table_width, max_model_len, BLOCK: tl.constexpr, COUNTED: tl.constexpr
):
    """Add how many of the `count` rows from position `start` are below max_model_len and in the null block."""
    offset = tl.arange(0, COUNTED)
    position = start + offset
    written = (offset < count) & (position < max_model_len) & (position >= 0)
    index = tl.minimum(tl.maximum(position, 0) // BLOCK, table_width - 1)
    block = tl.load(table + index, mask=written, other=1)
    number = tl.sum((block == 0).to(tl.int32), 0)
    if number > 0:
        tl.atomic_add(rows_without_block, number.to(tl.int64))


@triton.jit
def store_verified(at, last_token_id, draft_token_ids, row, live, inside, token_ids):
    """The tokens of one request's rows of a verify: the last token, then its drafts."""
    draft = tl.load(draft_token_ids + row - 1, mask=inside & (row > 0), other=0)
    token = tl.where(row == 0, tl.load(last_token_id), draft)
    token = tl.maximum(tl.where(live, token, 0), 0)  # -1, no draft token, is a row that verification rejects
    tl.store(token_ids + at, token, mask=inside)


@triton.jit
def begin_propose_kernel(
    sampled_token_ids, num_sampled, start_positions, block_table, token_ids, positions, slot_mapping, seq_lens,
    last_rows, step_positions, step_seq_lens, draft_step, rows_without_block, query_len, later_rows, sampled_stride,
    table_stride, table_width, max_model_len,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COUNTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    offset = tl.arange(0, WIDTH)
    row = offset < query_len
    count = tl.load(num_sampled + request)
    start = tl.load(start_positions + request)
    live = count > 0
    token = tl.load(sampled_token_ids + request * sampled_stride + offset, mask=row & (offset < count), other=0)
    at = request * query_len + offset
    tl.store(token_ids + at, token, mask=row)
    store_places(
        at, start + offset, live, live, row, positions, slot_mapping, block_table + request * table_stride,
        table_stride, table_width, max_model_len, BLOCK,
    )  # fmt: skip
    tl.store(seq_lens + request, tl.where(live, start + query_len, 0).to(tl.int32))
    tl.store(last_rows + request, (request * query_len + tl.maximum(count - 1, 0)).to(tl.int64))
    length = tl.where(live, start + count, 0)
    tl.store(step_seq_lens + request, length.to(tl.int32))
    tl.store(step_positions + request, tl.minimum(tl.maximum(length - 1, 0), max_model_len - 1))
    if request == 0:
        tl.store(draft_step, tl.zeros((), tl.int64))
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start, tl.where(live, count + later_rows, 0), block_table + request * table_stride,
            table_width, max_model_len, BLOCK, COUNTED,
        )  # fmt: skip


@triton.jit
def begin_block_kernel(
    sampled_token_ids, num_sampled, start_positions, block_table, context_positions, context_slots, token_ids,
    positions, slot_mapping, seq_lens, rows_without_block, query_len, length, sampled_stride, table_stride,
    table_width, mask_token_id, max_model_len,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, COUNTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request: its context rows, then its block of `length` rows."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    count = tl.load(num_sampled + request)
    start = tl.load(start_positions + request)
    live = count > 0
    table = block_table + request * table_stride
    offset = tl.arange(0, WIDTH)
    row = offset < query_len
    known = row & (offset < count)
    at = request * query_len + offset
    store_places(
        at, start + offset, known, known, row, context_positions, context_slots, table, table_stride, table_width,
        max_model_len, BLOCK,
    )  # fmt: skip
    latest = tl.load(sampled_token_ids + request * sampled_stride + tl.maximum(count - 1, 0))
    column = tl.arange(0, LENGTH)
    inside = column < length
    at = request * length + column
    token = tl.where(live & (column == 0), latest, mask_token_id)
    tl.store(token_ids + at, token, mask=inside)
    begin = start + count
    store_places(
        at, begin + column, live, live, inside, positions, slot_mapping, table, table_stride, table_width,
        max_model_len, BLOCK,
    )  # fmt: skip
    end = tl.where(live, tl.minimum(begin + length, max_model_len), 0)
    tl.store(seq_lens + request, end.to(tl.int32))
    if rows_without_block is not None:
        count_rows_without_block(
            rows_without_block, start, tl.where(live, count + length, 0), table,
            table_width, max_model_len, BLOCK, COUNTED,
        )  # fmt: skip


@triton.jit
def begin_verify_kernel(
    last_token_ids, draft_token_ids, start_positions, block_table, token_ids, positions, slot_mapping, seq_lens,
    query_len, draft_stride, table_stride, table_width, max_model_len,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    offset = tl.arange(0, WIDTH)
    row = offset < query_len
    start = tl.load(start_positions + request)
    live = start >= 0
    at = request * query_len + offset
    store_verified(at, last_token_ids + request, draft_token_ids + request * draft_stride, offset, live, row, token_ids)
    store_places(
        at, start + offset, live, live, row, positions, slot_mapping, block_table + request * table_stride,
        table_stride, table_width, max_model_len, BLOCK,
    )  # fmt: skip
    tl.store(seq_lens + request, tl.where(live, start + query_len, 0).to(tl.int32))


@triton.jit
def begin_tree_kernel(
    last_token_ids, draft_token_ids, draft_parents, start_positions, block_table, token_ids, positions, slot_mapping,
    seq_lens, ancestors, rows, num_steps, drafts_stride, parents_stride, table_stride, table_width, max_model_len,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request. ROWS is a power of two that holds its rows."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    row = tl.arange(0, ROWS)
    known = row < rows
    start = tl.load(start_positions + request)
    live = start >= 0
    parent = tl.load(draft_parents + request * parents_stride + row - 1, mask=known & (row > 0), other=0)
    follows = parent[:, None] == row[None, :]
    own = tl.full((ROWS,), 1, tl.int64) << row.to(tl.int64)
    bits = own
    depth = tl.zeros((ROWS,), tl.int64)
    for _ in range(num_steps):  # each time what is known of the parents moves one level down
        bits = own | tl.sum(tl.where(follows, bits[None, :], 0), axis=1)
        depth = tl.where(row > 0, tl.sum(tl.where(follows, depth[None, :], 0), axis=1) + 1, 0)
    at = request * rows + row
    store_verified(at, last_token_ids + request, draft_token_ids + request * drafts_stride, row, live, known, token_ids)
    position = tl.where(live, start + depth, 0)
    tl.store(positions + at, tl.minimum(tl.maximum(position, 0), max_model_len - 1), mask=known)
    table = block_table + request * table_stride
    slot = slots_of(start + row, table, live & known, table_stride, table_width, table_width * BLOCK, BLOCK)
    tl.store(slot_mapping + at, slot, mask=known)
    tl.store(seq_lens + request, tl.where(live, start + rows, 0).to(tl.int32))
    tl.store(ancestors + at, bits, mask=known)


@triton.jit
def advance_kernel(
    seq_lens, positions, slot_mapping, draft_step, block_table, requests, table_stride, table_width, max_model_len,
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for all requests."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.arange(0, REQUESTS)
    known = request < requests
    length = tl.load(seq_lens + request, mask=known, other=0)
    live = length > 0
    length += live.to(tl.int32)
    tl.store(seq_lens + request, length, mask=known)
    position = length.to(tl.int64) - 1
    slot = slots_of(
        position, block_table + request * table_stride, live & known, table_stride, table_width, max_model_len, BLOCK
    )
    tl.store(slot_mapping + request, slot, mask=known)
    tl.store(positions + request, tl.minimum(tl.maximum(position, 0), max_model_len - 1), mask=known)
    tl.store(draft_step, tl.load(draft_step) + 1)

# type: ignore  (Triton compiles it; no type checker can read it)
"""`fill_batch` as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.draft import ProposeBatch
from specgraph_plugin.verify_output import VerifyOutput


@triton.jit(
    do_not_specialize=["n", "query_len", "most", "start_stride", "table_stride", "columns", "max_model_len", "reach"]
)
def fill_batch_kernel(
    token_ids, num_sampled, starts, first_rows, last_tokens, last_rows, table, table_rows,
    states, to_sampled_token_ids, to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
    n, query_len, most, start_stride, table_stride, columns, max_model_len, reach, to_stride, to_columns,
    SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, HAS_ROWS: tl.constexpr, ROW: tl.constexpr, TABLE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Copy the results of a verify; one program per (request, row, part of a hidden state).

    The first program of a request also copies its small tensors. All programs of a request share its block table, TABLE
    entries at a time: with blocks of one token it has an entry per position. STEP columns of the host engine's table
    are one block. `most` is the index of the engine's last row, since the rows after a request's own may lie past it.
    """
    request = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    live = request < n
    first = request * query_len
    if HAS_FIRST:
        first = tl.load(first_rows + request, mask=live, other=0).to(tl.int32)
    count = tl.load(num_sampled + request, mask=live, other=0).to(tl.int32)
    if (row == 0) & (part == 0):
        tl.store(to_num_sampled + request, count)
        if live:
            own = request * query_len
            tl.store(to_start_positions + request, tl.load(starts + request * start_stride).to(tl.int64))
            offset = tl.arange(0, ROW)
            if HAS_LAST:
                place = tl.load(last_rows + request).to(tl.int64)
                is_last = (offset == count - 1) & (place >= 0)
                token = tl.load(token_ids + first + offset + 1, mask=(offset < count) & ~is_last, other=0).to(tl.int64)
                last = tl.load(last_tokens + place, mask=place >= 0, other=0).to(tl.int64)
                token = tl.where(is_last, last, token)
            else:
                token = tl.load(token_ids + first + offset, mask=offset < count, other=0).to(tl.int64)
            tl.store(to_sampled_token_ids + own + offset, token, mask=offset < query_len)
    if live:
        start = tl.load(starts + request * start_stride).to(tl.int64)
        end = tl.minimum(start + tl.maximum(reach, count), max_model_len)
        place = request.to(tl.int64)
        if HAS_ROWS:
            place = tl.load(table_rows + request).to(tl.int64)
        entries = table + place * table_stride
        parts = tl.num_programs(2)
        for begin in range((row * parts + part) * TABLE, to_columns, query_len * parts * TABLE):
            block = begin + tl.arange(0, TABLE)
            owned = (block * STEP < columns) & (block * BLOCK < end)
            entry = tl.load(entries + block * STEP, mask=owned, other=0)
            tl.store(to_block_table + request * to_stride + block, entry // STEP, mask=block < to_columns)
        at = (request * query_len + row).to(tl.int64)
        taken = tl.minimum(first + row, most).to(tl.int64)
        parts_of_a_state: tl.constexpr = (SIZE + PART - 1) // PART
        state = part // parts_of_a_state
        source = states[0]
        for index in tl.static_range(1, COUNT):
            if state == index:
                source = states[index]
        element = part % parts_of_a_state * PART + tl.arange(0, PART)
        values = tl.load(source + taken * SIZE + element, mask=element < SIZE)
        tl.store(to_aux_hidden + (at * COUNT + state) * SIZE + element, values, mask=element < SIZE)


def fill_batch_by_kernel(
    end: VerifyOutput, into: ProposeBatch, max_model_len: int, block_size: int, reach: int
) -> None:
    states, query_len = tuple(state.contiguous() for state in end.hidden_states), into.query_len
    count, size = len(states), states[0].shape[1]
    has_first, has_last, has_rows = (x is not None for x in (end.first_rows, end.last_tokens, end.table_rows))
    part = min(4096, triton.next_power_of_2(size))
    fill_batch_kernel[(into.num_requests, query_len, count * triton.cdiv(size, part))](
        end.token_ids, end.num_sampled, end.starts, end.first_rows if has_first else end.num_sampled,
        end.last_tokens if has_last else end.num_sampled, end.last_rows if has_last else end.num_sampled,
        end.table, end.table_rows if has_rows else end.num_sampled,
        states, into.sampled_token_ids, into.num_sampled, into.start_positions, into.aux_hidden, into.block_table,
        end.num_requests, query_len, states[0].shape[0] - 1, end.starts.stride(0), end.table.stride(0),
        end.table.shape[1], max_model_len, reach, into.block_table.stride(0), into.block_table.shape[1],
        SIZE=size, COUNT=count, BLOCK=block_size,
        STEP=block_size if end.table_of_slots else 1, HAS_FIRST=has_first, HAS_LAST=has_last, HAS_ROWS=has_rows,
        ROW=triton.next_power_of_2(query_len), TABLE=512, PART=part, num_warps=4,
    )  # fmt: skip

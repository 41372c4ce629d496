"""The hand-over of a verify as one Triton kernel."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, power_of_two
from specgraph.ops.copies import BatchTensors

MOST_STATES = 8
"""Hidden states per row that the kernel takes. Each is an argument: Triton takes tuples of pointers since 3.3 only."""


@triton.jit(
    do_not_specialize=["n", "query_len", "most", "start_stride", "table_stride", "columns", "max_model_len", "reach"]
)
def load_verify_output_kernel(
    token_ids, num_sampled, starts, first_rows, last_tokens, last_rows, table, table_rows,
    states_0, states_1, states_2, states_3, states_4, states_5, states_6, states_7,
    to_sampled_token_ids, to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
    n, query_len, most, start_stride, table_stride, columns, max_model_len, reach, to_stride, to_columns,
    SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, HAS_ROWS: tl.constexpr, ROW: tl.constexpr, TABLE: tl.constexpr,
    PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy the results of a verify; one program per (request, row, part of a hidden state).

    The first program of a request also copies its small tensors. All programs of a request share its block table, TABLE
    entries at a time: with blocks of one token it has an entry per position. STEP columns of the host engine's table
    are one block. `most` is the index of the engine's last row, since the rows after a request's own may lie past it.
    """
    if OVERLAP is not None:
        OVERLAP()
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
        source = states_0
        if COUNT > 1:
            if state == 1:
                source = states_1
            if state == 2:
                source = states_2
            if state == 3:
                source = states_3
            if state == 4:
                source = states_4
            if state == 5:
                source = states_5
            if state == 6:
                source = states_6
            if state == 7:
                source = states_7
        element = part % parts_of_a_state * PART + tl.arange(0, PART)
        values = tl.load(source + taken * SIZE + element, mask=element < SIZE)
        tl.store(to_aux_hidden + (at * COUNT + state) * SIZE + element, values, mask=element < SIZE)


class PluginOps(Launcher):
    """The implementation of the op in `specgraph_plugin.verify_output`."""

    __slots__ = ()

    def load_verify_output(
        self,
        token_ids: Tensor,
        num_sampled: Tensor,
        starts: Tensor,
        table: Tensor,
        hidden_states: Sequence[Tensor],
        to: BatchTensors,
        first_rows: Tensor | None,
        table_rows: Tensor | None,
        last_tokens: Tensor | None,
        last_rows: Tensor | None,
        table_of_slots: bool,
        max_model_len: int,
        block_size: int,
        reach: int,
    ) -> None:
        states = [state.contiguous() for state in hidden_states]
        count, size, query_len = len(states), states[0].shape[1], to.sampled_token_ids.shape[1]
        if count > MOST_STATES:
            return NotImplemented
        has_first, has_last, has_rows = (given is not None for given in (first_rows, last_tokens, table_rows))
        part = min(4096, power_of_two(size))
        self.launch(
            load_verify_output_kernel, (to.num_sampled.shape[0], query_len, count * ceil_div(size, part)),
            token_ids, num_sampled, starts, first_rows if has_first else num_sampled,
            last_tokens if has_last else num_sampled, last_rows if has_last else num_sampled,
            table, table_rows if has_rows else num_sampled,
            *states, *states[:1] * (MOST_STATES - count), *to,
            num_sampled.shape[0], query_len, states[0].shape[0] - 1, starts.stride(0), table.stride(0),
            table.shape[1], max_model_len, reach, to.block_table.stride(0), to.block_table.shape[1],
            SIZE=size, COUNT=count, BLOCK=block_size,
            STEP=block_size if table_of_slots else 1, HAS_FIRST=has_first, HAS_LAST=has_last, HAS_ROWS=has_rows,
            ROW=power_of_two(query_len), TABLE=512, PART=part, num_warps=4,
        )  # fmt: skip

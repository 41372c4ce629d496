# type: ignore  (what Triton compiles is not what a type checker reads)
"""`fill_round` as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph import ProposeBatch
from specgraph_vllm.round_end import RoundEnd


@triton.jit(do_not_specialize=["n", "query_len", "width", "max_model_len"])
def fill_round_kernel(
    input_ids, positions, num_sampled, last_sampled, idx_mapping, block_table, aux0, aux1, aux2, aux3,
    to_sampled_token_ids, to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
    n, query_len, hidden, table_stride, width, max_model_len,
    TO_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr, TABLE: tl.constexpr, HIDDEN: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """One program per (request, row, hidden state); the first of a request takes its small tensors too."""
    request = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    live = request < n
    if (row == 0) & (part == 0):
        count = tl.load(num_sampled + request, mask=live, other=0)
        tl.store(to_num_sampled + request, count)
        if live:
            first = request * query_len
            start = tl.load(positions + first)
            tl.store(to_start_positions + request, start)
            offset = tl.arange(0, ROW)
            draft = tl.load(input_ids + first + offset + 1, mask=offset < count - 1, other=0).to(tl.int64)
            last = tl.load(last_sampled + tl.load(idx_mapping + request))
            token = tl.where(offset == count - 1, last, draft)
            tl.store(to_sampled_token_ids + first + offset, token, mask=offset < query_len)
            end = tl.minimum(start + 2 * query_len - 1, max_model_len)
            for begin in range(0, TO_WIDTH, TABLE):
                column = begin + tl.arange(0, TABLE)
                owned = (column < width) & (column * BLOCK < end)
                block = tl.load(block_table + request.to(tl.int64) * table_stride + column, mask=owned, other=0)
                tl.store(to_block_table + request * TO_WIDTH + column, block, mask=column < TO_WIDTH)
    if live:
        at = (request * query_len + row).to(tl.int64)
        element = tl.arange(0, HIDDEN)
        inside = element < hidden
        source = aux0
        if part == 1:
            source = aux1
        if part == 2:
            source = aux2
        if part == 3:
            source = aux3
        state = tl.load(source + at * hidden + element, mask=inside)
        tl.store(to_aux_hidden + (at * COUNT + part) * hidden + element, state, mask=inside)


def fill_round_on_gpu(end: RoundEnd, into: ProposeBatch, max_model_len: int, block_size: int) -> None:
    """See `specgraph_vllm.round_end.fill_round`."""
    states = [state.contiguous() for state in end.hidden_states]
    count, hidden, query_len = len(states), states[0].shape[1], into.query_len
    padded = [states[min(index, count - 1)] for index in range(4)]
    fill_round_kernel[(into.num_requests, query_len, count)](
        end.input_ids, end.positions, end.num_sampled, end.last_sampled, end.idx_mapping, end.block_table, *padded,
        into.sampled_token_ids, into.num_sampled, into.start_positions, into.aux_hidden, into.block_table,
        end.num_requests, query_len, hidden, end.block_table.stride(0), end.block_table.shape[1], max_model_len,
        TO_WIDTH=into.block_table.shape[1], BLOCK=block_size, ROW=triton.next_power_of_2(query_len), TABLE=1024,
        HIDDEN=triton.next_power_of_2(hidden), COUNT=count, num_warps=4,
    )  # fmt: skip

# type: ignore  (what Triton compiles is not what a type checker reads)
"""`fill_round` as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph import ProposeBatch
from specgraph_sglang.round_end import RoundEnd


@triton.jit(do_not_specialize=["n", "query_len", "columns", "max_model_len"])
def fill_round_kernel(
    next_token_ids, accept_lens, seq_lens, req_pool_indices, req_to_token, hidden_states,
    to_sampled_token_ids, to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
    n, query_len, table_stride, columns, max_model_len,
    AUX: tl.constexpr, TO_WIDTH: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, TABLE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One program per (request, row, part of the hidden states).

    The first of a request takes its small tensors too. All of them share its block table, chunk by chunk: with pages of
    one token it has as many entries as the context has positions.
    """
    request = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    live = request < n
    if (row == 0) & (part == 0):
        count = tl.load(accept_lens + request, mask=live, other=0).to(tl.int32)
        tl.store(to_num_sampled + request, count)
        if live:
            first = request * query_len
            tl.store(to_start_positions + request, tl.load(seq_lens + request).to(tl.int64))
            offset = tl.arange(0, ROW)
            token = tl.load(next_token_ids + first + offset, mask=offset < count, other=0).to(tl.int64)
            tl.store(to_sampled_token_ids + first + offset, token, mask=offset < query_len)
    if live:
        reach = tl.minimum(tl.load(seq_lens + request).to(tl.int64) + 2 * query_len - 1, max_model_len)
        slots = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
        parts = tl.num_programs(2)
        for begin in range((row * parts + part) * TABLE, TO_WIDTH, query_len * parts * TABLE):
            page = begin + tl.arange(0, TABLE)
            owned = (page * PAGE < columns) & (page * PAGE < reach)
            slot = tl.load(slots + page * PAGE, mask=owned, other=0)
            tl.store(to_block_table + request * TO_WIDTH + page, slot // PAGE, mask=page < TO_WIDTH)
        at = (request * query_len + row).to(tl.int64) * AUX
        element = part * PART + tl.arange(0, PART)
        state = tl.load(hidden_states + at + element, mask=element < AUX)
        tl.store(to_aux_hidden + at + element, state, mask=element < AUX)


def fill_round_on_gpu(end: RoundEnd, into: ProposeBatch, max_model_len: int, page_size: int) -> None:
    """See `specgraph_sglang.round_end.fill_round`."""
    states, query_len = end.hidden_states.contiguous(), into.query_len
    part = min(4096, triton.next_power_of_2(states.shape[1]))
    fill_round_kernel[(into.num_requests, query_len, triton.cdiv(states.shape[1], part))](
        end.next_token_ids, end.accept_lens, end.seq_lens, end.req_pool_indices, end.req_to_token, states,
        into.sampled_token_ids, into.num_sampled, into.start_positions, into.aux_hidden, into.block_table,
        end.num_requests, query_len, end.req_to_token.stride(0), end.req_to_token.shape[1], max_model_len,
        AUX=states.shape[1], TO_WIDTH=into.block_table.shape[1], PAGE=page_size,
        ROW=triton.next_power_of_2(query_len), TABLE=512, PART=part, num_warps=4,
    )  # fmt: skip

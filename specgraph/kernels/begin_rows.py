"""Kernels of `begin_rows`, the first node of each captured pass, and of `advance`, which moves rows one token on."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, contiguous_rows, power_of_two
from specgraph.kernels.past_rows import STATE_CHUNK
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.past_rows import PastRows


@triton.jit
def slots_of(position, block_table, valid, table_width, max_model_len, BLOCK: tl.constexpr):
    """Return the KV slots of one request's positions, which need not be clamped.

    A slot is -1 if `valid` is False, the position is past max_model_len, or its block is the null block.
    """
    inside = valid & (position < max_model_len) & (position >= 0)
    index = tl.minimum(tl.minimum(tl.maximum(position, 0), max_model_len - 1) // BLOCK, table_width - 1)
    block = tl.load(block_table + index, mask=inside, other=0).to(tl.int64)
    return tl.where(inside & (block != 0), block * BLOCK + position % BLOCK, -1)


@triton.jit
def count_rows_without_block(
    rows_without_block, start, count, table, table_width, max_model_len, BLOCK: tl.constexpr, COUNTED: tl.constexpr
):
    """Count the rows below max_model_len in the null block, of the `count` rows from position `start` on."""
    offset = tl.arange(0, COUNTED)
    position = start + offset
    written = (offset < count) & (position < max_model_len) & (position >= 0)
    index = tl.minimum(tl.maximum(position, 0) // BLOCK, table_width - 1)
    block = tl.load(table + index, mask=written, other=1)
    number = tl.sum((block == 0).to(tl.int32), 0)
    if number > 0:
        tl.atomic_add(rows_without_block, number.to(tl.int64))


@triton.jit
def depths_and_ancestors(draft_parents, row, inside, num_steps, ROWS: tl.constexpr):
    """Return the depth of each row of one request's tree, and the bits of its ancestors and its own."""
    parent = tl.load(draft_parents + row - 1, mask=inside & (row > 0), other=0)
    follows = parent[:, None] == row[None, :]
    own = tl.full((ROWS,), 1, tl.int64) << row.to(tl.int64)
    bits = own
    depth = tl.zeros((ROWS,), tl.int64)
    for _ in range(num_steps):  # each pass carries depths and ancestors one level down
        bits = own | tl.sum(tl.where(follows, bits[None, :], 0), axis=1)
        depth = tl.where(row > 0, tl.sum(tl.where(follows, depth[None, :], 0), axis=1) + 1, 0)
    return depth, bits


@triton.jit
def find_past_rows(position, wanted, past_positions, table, table_width, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Return which wanted rows can be used, and all rows' entries: a row can if it and all later ones were kept."""
    block = tl.load(table + tl.minimum(position // BLOCK, table_width - 1), mask=wanted, other=0).to(tl.int64)
    entry = block * KEPT + position % BLOCK % KEPT
    holds = tl.load(past_positions + entry, mask=wanted, other=-1)
    missing = wanted & ((holds != position) | (block == 0))
    gap = tl.sum((missing[None, :] & (position[None, :] >= position[:, None])).to(tl.int32), axis=1)
    return wanted & (gap == 0), entry


@triton.jit
def begin_rows_kernel(
    start_positions, block_table, num_sampled, token_ids, draft_token_ids, draft_parents, batch_hidden,
    positions, slot_mapping, seq_lens, to_token_ids, last_rows, step_positions, step_seq_lens, draft_step, hidden_rows,
    hidden, context_positions, context_slots, ancestors, rows_without_block,
    past_token_ids, past_positions, past_hidden,
    rows, past, rows_behind, filler, position_offset, tree_steps, max_model_len, query_len, num_last, size,
    table_stride, table_width, token_stride, draft_stride, parent_stride, hidden_stride,
    BLOCK: tl.constexpr, AFTER_SAMPLED: tl.constexpr, SLOTS_OF_REJECTED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, LAST: tl.constexpr, COUNTED: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request, or per request and row if past rows are used: each then writes one row's hidden state.

    The first program of a request writes everything else. ROWS, COLUMNS, LAST and COUNTED are powers of two that hold
    a request's rows, the batch's columns, the last rows and the rows to count.
    """
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, ROWS)
    inside = index < rows
    start = tl.load(start_positions + request) + position_offset
    count = tl.where(start < 0, 0, rows) if num_sampled is None else tl.load(num_sampled + request)
    live = count > 0
    table = block_table + request * table_stride
    if AFTER_SAMPLED:
        begin = start + count
        column = index + count - 1
    else:
        begin = tl.maximum(start - past, 0)
        column = index + begin - start
    position = begin + index
    known = inside & (column >= 0) & (column < count)
    kept = inside & live & (column >= 0)
    if not SLOTS_OF_REJECTED:
        kept = kept & (column < count + rows_behind)
    if token_ids is not None:
        columns = token_ids + request * token_stride
        if draft_token_ids is None:
            token = tl.load(columns + column, mask=known, other=0)
        else:
            draft = tl.load(draft_token_ids + request * draft_stride + column - 1, mask=known & (column > 0), other=0)
            token = tl.maximum(tl.where(column == 0, tl.load(columns), draft), 0)  # -1, no draft token, is a row too
        token = tl.where(known, token, filler)
    if past_positions is not None:
        wanted = inside & live & (column < 0)
        found, entry = find_past_rows(position, wanted, past_positions, table, table_width, KEPT, BLOCK)
        kept = kept | found
        token = tl.where(found, tl.load(past_token_ids + entry, mask=found, other=0), token)
        own = index == tl.program_id(1)
        old = tl.sum((own & found).to(tl.int32), 0) > 0
        new = tl.sum((own & known).to(tl.int32), 0) > 0
        old_line = tl.sum(tl.where(own, entry, 0), 0)
        new_line = request * query_len + tl.sum(tl.where(own, column, 0), 0)
        at = hidden + (request * rows + tl.program_id(1)) * size
        for first in range(0, size, CHUNK):
            element = first + tl.arange(0, CHUNK)
            there = element < size
            state = tl.load(batch_hidden + new_line * hidden_stride + element, mask=there & new, other=0.0)
            held = tl.load(past_hidden + old_line * size + element, mask=there & old, other=0.0)
            tl.store(at + element, tl.where(old, held, state), mask=there)
    if tl.program_id(1) == 0:
        line = request * rows + index
        if to_token_ids is not None:
            tl.store(to_token_ids + line, token, mask=inside)
        reserved = max_model_len
        shown = position
        if ancestors is not None:
            parents = draft_parents + request * parent_stride
            depth, bits = depths_and_ancestors(parents, index, inside, tree_steps, ROWS)
            reserved = table_width * BLOCK
            shown = start + depth
            tl.store(ancestors + line, bits, mask=inside)
        tl.store(positions + line, tl.minimum(tl.maximum(tl.where(live, shown, 0), 0), max_model_len - 1), mask=inside)
        tl.store(slot_mapping + line, slots_of(position, table, kept, table_width, reserved, BLOCK), mask=inside)
        length = begin + rows
        if AFTER_SAMPLED:
            length = tl.minimum(length, max_model_len)
        tl.store(seq_lens + request, tl.where(live, length, 0).to(tl.int32))
        if last_rows is not None:
            last = request * rows + tl.maximum(start - begin + count - 1, 0)
            behind = tl.arange(0, LAST)
            tl.store(last_rows + request * num_last + behind, last + behind, mask=behind < num_last)
        reached = tl.where(live, start + count, 0)
        if step_seq_lens is not None:
            tl.store(step_seq_lens + request, reached.to(tl.int32))
        if step_positions is not None:
            tl.store(step_positions + request, tl.minimum(tl.maximum(reached - 1, 0), max_model_len - 1))
        if draft_step is not None:
            tl.store(draft_step, tl.zeros((), tl.int64), mask=request == 0)
        if hidden_rows is not None:
            none = tl.num_programs(0).to(tl.int64) * query_len
            tl.store(hidden_rows + line, tl.where(known, request * query_len + column, none), mask=inside)
        if context_positions is not None:
            offset = tl.arange(0, COLUMNS)
            taken = (offset < query_len) & (offset < count)
            place = tl.minimum(tl.maximum(tl.where(taken, start + offset, 0), 0), max_model_len - 1)
            to = request * query_len + offset
            tl.store(context_positions + to, place, mask=offset < query_len)
            slot = slots_of(start + offset, table, taken, table_width, max_model_len, BLOCK)
            tl.store(context_slots + to, slot, mask=offset < query_len)
        if rows_without_block is not None:
            later = tl.where(live, count + rows_behind, 0)
            count_rows_without_block(
                rows_without_block, start, later, table, table_width, max_model_len, BLOCK, COUNTED
            )


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
    table = block_table + request * table_stride
    slot = slots_of(position, table, live & known, table_width, max_model_len, BLOCK)
    tl.store(slot_mapping + request, slot, mask=known)
    tl.store(positions + request, tl.minimum(tl.maximum(position, 0), max_model_len - 1), mask=known)
    tl.store(draft_step, tl.load(draft_step) + 1)


class BeginRowsOps(Launcher):
    """Implementations of `specgraph.ops.begin_rows` and `specgraph.ops.advance`."""

    __slots__ = ()

    def begin_rows(self, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None) -> None:
        requests, table = given.block_table.shape[0], given.block_table
        of_rows = (given.token_ids, given.draft_token_ids, given.draft_parents, given.hidden)
        tokens, drafts, parents, hidden = (None if t is None else contiguous_rows(t) for t in of_rows)
        columns = 0 if tokens is None else tokens.shape[1]
        num_last = 0 if rows.last_rows is None else rows.last_rows.shape[0] // requests
        size = 0 if past is None else past.hidden.shape[2]
        self.launch(
            begin_rows_kernel, (requests, 1 if past is None else plan.rows),
            given.start_positions.contiguous(), table,
            None if given.num_sampled is None else given.num_sampled.contiguous(), tokens, drafts, parents, hidden,
            *rows, *(past or (None, None, None)), plan.rows, plan.past, plan.rows_behind, plan.filler,
            plan.position_offset, plan.tree_steps, plan.max_model_len, columns, num_last, size, table.stride(0),
            table.shape[1], *(0 if t is None else t.stride(0) for t in (tokens, drafts, parents, hidden)),
            BLOCK=plan.block_size, AFTER_SAMPLED=plan.after_sampled, SLOTS_OF_REJECTED=plan.slots_of_rejected,
            ROWS=power_of_two(plan.rows), COLUMNS=power_of_two(columns), LAST=power_of_two(num_last),
            COUNTED=power_of_two(columns + plan.rows_behind), KEPT=1 if past is None else past.positions.shape[1],
            CHUNK=min(STATE_CHUNK, power_of_two(size)), num_warps=1 if past is None and plan.rows <= 128 else 4,
        )  # fmt: skip

    def advance(
        self, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int,
    ) -> None:  # fmt: skip
        self.launch(
            advance_kernel, (1,),
            seq_lens, positions, slot_mapping, draft_step, block_table, seq_lens.shape[0], block_table.stride(0),
            block_table.shape[1], max_model_len, BLOCK=block_size,
            REQUESTS=power_of_two(seq_lens.shape[0]), num_warps=1,
        )  # fmt: skip

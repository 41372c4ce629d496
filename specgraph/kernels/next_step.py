# type: ignore  (what Triton compiles is not what a type checker reads)
"""Between two greedy draft steps of one launch: the last comparison, moving one token on, and the next step's input."""

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.begin_rows import slots_of
from specgraph.kernels.norm import write_normed
from specgraph.kernels.sampling import best_token


@triton.jit
def next_step_kernel(
    best_value, best_index, column, draft_to_target, draft_step, token_ids, draft_token_ids, seq_lens, positions,
    slot_mapping, block_table, table, table_norm, hidden, hidden_norm, out, blocks, draft_stride, own_stride,
    own_blocks, max_model_len, table_stride, width, hidden_width, hidden_stride, eps,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Two programs per request: one for its token and embedding, one for its place and hidden state.

    `column` is what `draft_step` was when the kernel before ran: it is written here while others would read it.
    """
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    to = out + row * (width + hidden_width)
    if tl.program_id(1) == 0:
        token = best_token(best_value, best_index, row, blocks, BLOCKS)
        if draft_to_target is not None:
            token += tl.load(draft_to_target + token)
        tl.store(token_ids + row, token)
        tl.store(draft_token_ids + row * draft_stride + tl.load(column), token)
        write_normed(table + token * table_stride, table_norm, to, width, eps, WIDTH)
    else:
        length = tl.load(seq_lens + row)
        live = length > 0
        length += live.to(tl.int32)
        tl.store(seq_lens + row, length)
        position = length.to(tl.int64) - 1
        own = block_table + row * own_stride
        tl.store(slot_mapping + row, slots_of(position, own, live, own_blocks, max_model_len, BLOCK))
        tl.store(positions + row, tl.minimum(tl.maximum(position, 0), max_model_len - 1))
        if row == 0:
            tl.store(draft_step, tl.load(column) + 1)
        write_normed(hidden + row * hidden_stride, hidden_norm, to + width, hidden_width, eps, HIDDEN_WIDTH)

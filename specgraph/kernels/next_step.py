"""The kernel between two greedy draft steps: it writes the token, the next position and the next draft step's input."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.begin_rows import BeginRowsOps, slots_of
from specgraph.kernels.launch import contiguous_rows, power_of_two
from specgraph.kernels.norm import write_normed
from specgraph.kernels.sampling import SamplingOps, best_token, require_rows
from specgraph.ops.draft_sampling import Drafts, LmHead
from specgraph.ops.linear import PairInput


@triton.jit
def next_step_kernel(
    best_value, best_index, column, draft_to_target, draft_step, token_ids, draft_token_ids, seq_lens, positions,
    slot_mapping, block_table, table, table_norm, hidden, hidden_norm, out, blocks, draft_stride, own_stride,
    own_blocks, max_model_len, table_stride, width, hidden_width, hidden_stride, eps,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Two programs per request: one for its token and embedding, one for its position and hidden state.

    `column` has the value of `draft_step` from the kernel before: one program here writes `draft_step` while others
    would read it.
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


class NextStepOps(SamplingOps, BeginRowsOps):
    """The implementation of `specgraph.ops.greedy_next_step`."""

    __slots__ = ()

    def greedy_next_step(
        self, x: Tensor, head: LmHead, drafts: Drafts, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor,
        block_table: Tensor, max_model_len: int, block_size: int, hidden: Tensor, pair: PairInput,
    ) -> Tensor:  # fmt: skip
        """Run `specgraph.ops.greedy_next_step` with one kernel after the linear of the head, if a tile can take it."""
        draft_token_ids, draft_to_target, draft_step, token_ids = drafts
        assert draft_step is not None
        assert token_ids is not None
        (table, table_norm, hidden_norm, eps), weight, own = pair, head.weight, self._own(x, None)
        one = self._tile("head", x, weight, weight.shape[0]) is not None or (own and own.takes("BEST", x, weight))
        if not one or table.stride(1) != 1:
            self.draft_from_hidden(x, head, drafts)
            self.advance(seq_lens, positions, slot_mapping, draft_step, block_table, max_model_len, block_size)
            return self._pair(token_ids, hidden, pair)
        require_rows(drafts)
        column = draft_step.new_empty(1)
        picked = self.best_by_block(x, head, None, (draft_step, column))
        hidden = contiguous_rows(hidden)
        rows, width, hidden_width = hidden.shape[0], table.shape[1], hidden.shape[1]
        out = hidden.new_empty(rows, width + hidden_width)
        self.launch(
            next_step_kernel, (rows, 2),
            picked.value, picked.index, column, draft_to_target, draft_step, token_ids, draft_token_ids, seq_lens,
            positions, slot_mapping, block_table, table, table_norm, hidden, hidden_norm, out, picked.blocks,
            draft_token_ids.stride(0), block_table.stride(0), block_table.shape[1], max_model_len,
            table.stride(0), width, hidden_width, hidden.stride(0), eps, BLOCKS=power_of_two(picked.blocks),
            BLOCK=block_size, WIDTH=power_of_two(width), HIDDEN_WIDTH=power_of_two(hidden_width), num_warps=8,
        )  # fmt: skip
        return out

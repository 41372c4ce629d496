"""Launching what lies between two greedy draft steps."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from torch import Tensor

from specgraph.kernels import next_step
from specgraph.kernels.launch import contiguous_rows, power_of_two
from specgraph.kernels.row_ops import RowOps
from specgraph.kernels.sampling_ops import SamplingOps, require_rows
from specgraph.ops.draft_sampling import Drafts, LmHead
from specgraph.ops.linear import PairInput


class NextStepOps(SamplingOps, RowOps):
    """The implementation of `specgraph.ops.greedy_next_step`."""

    __slots__ = ()

    def greedy_next_step(
        self, x: Tensor, head: LmHead, drafts: Drafts, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor,
        block_table: Tensor, max_model_len: int, block_size: int, hidden: Tensor, pair: PairInput,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.greedy_next_step`: one kernel after the linear of the head."""
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
            next_step.next_step_kernel, (rows, 2),
            picked.value, picked.index, column, draft_to_target, draft_step, token_ids, draft_token_ids, seq_lens,
            positions, slot_mapping, block_table, table, table_norm, hidden, hidden_norm, out, picked.blocks,
            draft_token_ids.stride(0), block_table.stride(0), block_table.shape[1], max_model_len,
            table.stride(0), width, hidden_width, hidden.stride(0), eps, BLOCKS=power_of_two(picked.blocks),
            BLOCK=block_size, WIDTH=power_of_two(width), HIDDEN_WIDTH=power_of_two(hidden_width), num_warps=8,
        )  # fmt: skip
        return out

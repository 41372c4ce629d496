"""The parallel program (DFlash): all K tokens from one pass over a block of masked rows, attention not causal."""

from __future__ import annotations

from torch import Tensor

from specgraph.attention import AttentionMetadata
from specgraph.capture import MakeAttend
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.program import DraftProgram, begin_rows, draft_block
from specgraph.models.protocol import ParallelHead
from specgraph.ops.begin_rows import RowPlan


class ParallelProgram(DraftProgram[ParallelHead]):
    """One step: the round's hidden states become context keys and values, then the block runs.

    Every request has 1 + K rows in the block, padding included, so the rows of a captured size are a multiple of 1 + K.
    """

    @property
    def prefill_passes(self) -> int:
        """None attends: a prompt's context is stored without attention."""
        return 0

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """The round's rows are context; the block has 1 + K."""
        block = 1 + num_speculative_tokens
        plan = RowPlan(
            block,
            self.config.max_model_len,
            self.config.block_size,
            after_sampled=True,
            later_rows=block,
            filler=self.head.mask_token_id,
        )
        return PassRows(plan, query_len, later=block, carried=0)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        context = {"context_positions": b.first.positions, "context_slots": b.first.slot_mapping}
        begin_rows(b, b.step_rows._replace(**context))
        self.head.store_context(self.head.combine(b.inputs.aux_hidden), self.stack.store(b.first))
        hidden = self.head.forward(b.step_token_ids, make_attend(b.step, 0))
        blocks = hidden.view(b.inputs.num_sampled.shape[0], -1, hidden.shape[-1])
        draft_block(self.head, b, blocks[:, 1:].flatten(0, 1), self.tree)

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """See `DraftProgram.prefill`. Context is made from hidden states alone: tokens are not read."""
        self.head.store_context(self.head.combine(aux_hidden), self.stack.store(metadata))

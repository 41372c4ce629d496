"""The masked program (P-EAGLE): all K tokens from one causal pass over the round's rows and K - 1 masked rows."""

from __future__ import annotations

import torch

from specgraph import ops
from specgraph.capture import MakeAttend
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.program import DraftProgram, begin_rows, draft_block
from specgraph.models.protocol import MaskedHead
from specgraph.ops.begin_rows import RowPlan


class MaskedProgram(DraftProgram[MaskedHead]):
    """One step over query_len + K - 1 rows per request: those of the target's round, then K - 1 masked ones.

    The masked rows follow the last accepted one, so their keys lie in slots that the next round's rows overwrite.
    """

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """The pass has K - 1 rows more than the round."""
        length = query_len + max(1, num_speculative_tokens) - 1
        plan = RowPlan(
            length,
            self.config.max_model_len,
            self.config.block_size,
            later_rows=length - query_len,
            filler=self.head.mask_token_id,
        )
        return PassRows(plan, query_len, later=length, carried=length)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        drafts = b.draft_token_ids.numel() if self.tree is None else b.last_rows.numel() * self.tree.num_steps
        hidden_rows, draft_rows = (b.draft_token_ids.new_empty(n) for n in (b.step_token_ids.numel(), drafts))
        begin_rows(b, b.step_rows._replace(last_rows=draft_rows, hidden_rows=hidden_rows))
        combined = torch.cat([self.head.combine(b.inputs.aux_hidden), self.head.mask_hidden[None]])
        ops.take_rows(combined, hidden_rows, b.hidden)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, 0), draft_rows)
        draft_block(self.head, b, out.hidden, self.tree)

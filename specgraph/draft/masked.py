"""The masked program (P-EAGLE): all K tokens from one causal pass over the round's rows and K - 1 masked rows."""

from __future__ import annotations

import torch

from specgraph import ops
from specgraph.attention import HostLengths
from specgraph.capture import MakeAttend
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.host_lengths import HostRound
from specgraph.draft.program import DraftProgram, draft_block
from specgraph.models.protocol import MaskedHead


class MaskedProgram(DraftProgram[MaskedHead]):
    """One step over query_len + K - 1 rows per request: those of the target's round, then K - 1 masked ones.

    The masked rows follow the last accepted one, so their keys lie in slots that the next round's rows overwrite.
    """

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """The pass has K - 1 rows more than the round."""
        length = query_len + max(1, num_speculative_tokens) - 1
        return PassRows(query_len, later=length, carried=length)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        drafts = b.draft_token_ids.numel() if self.tree is None else b.last_rows.numel() * self.tree.num_steps
        hidden_rows, draft_rows = (b.draft_token_ids.new_empty(n) for n in (b.step_token_ids.numel(), drafts))
        ops.begin_masked(
            b.inputs.sampled_token_ids,
            b.inputs.num_sampled,
            b.inputs.start_positions,
            b.inputs.block_table,
            mask_token_id=self.head.mask_token_id,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            token_ids=b.step_token_ids,
            positions=b.step.positions,
            slot_mapping=b.step.slot_mapping,
            seq_lens=b.step.seq_lens,
            hidden_rows=hidden_rows,
            draft_rows=draft_rows,
            rows_without_block=b.round.rows_without_block,
        )
        combined = torch.cat([self.head.combine(b.inputs.aux_hidden), self.head.mask_hidden[None]])
        ops.take_rows(combined, hidden_rows, b.hidden)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, 0), draft_rows)
        draft_block(self.head, b, out.hidden, self.tree)

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. Accepted counts are not needed."""
        rows = host_round.query_len + host_round.num_speculative_tokens - 1
        return host_round.lengths(rows, [start + rows for start in host_round.start_positions])

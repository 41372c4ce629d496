"""The chain program: each step takes the token and the hidden state of the one before (EAGLE, EAGLE-3, reused MTP)."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from specgraph.attention import AdvancingAttention, HostLengths, advance
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import HostRound
from specgraph.drafting.program import DraftProgram, begin_rows, draft_one
from specgraph.drafting.round import RoundBuffers
from specgraph.graphs import AttentionStack, MakeAttend
from specgraph.models.protocol import DraftHead


class ChainProgram(DraftProgram[DraftHead]):
    """Step 0 over the target's rows, then K - 1 steps of one row per request."""

    def __init__(
        self, head: DraftHead, stack: AttentionStack, config: DraftConfig, memory: RoundBuffers, position_offset: int
    ) -> None:
        """position_offset: how much further than the target's rows the head's rows are (`OffsetHead`)."""
        super().__init__(head, stack, config, memory)
        self.position_offset = position_offset

    def passes(self, num_speculative_tokens: int) -> int:
        """K."""
        return num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """One row per request after step 0."""
        return PassRows(query_len, later=1, carried=1)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> Tensor:
        """See `DraftProgram.first`."""
        begin_rows(b, self.config, self.position_offset, b.draft_token_ids.shape[1] - 1)
        hidden = self.head.combine(b.inputs.aux_hidden)
        out = self.head.forward(b.token_ids, hidden, make_attend(b.first, 0), b.last_rows)
        draft_one(self.head, b, out.hidden)
        return out.carry

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        """See `DraftProgram.step`."""
        advance(b.step, b.draft_step, self.config.max_model_len, self.config.block_size)
        attention = self.stack.backend
        if hasattr(attention, "after_advance"):  # an attribute, not the type: a wrapper must not hide it
            cast(AdvancingAttention, attention).after_advance(b.step, b.draft_step)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, step))
        draft_one(self.head, b, out.hidden)
        return out.carry

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. Only later steps need the accepted counts."""
        offset = self.position_offset
        if step == 0:
            ends = [start + host_round.query_len + offset for start in host_round.start_positions]
            return host_round.lengths(host_round.query_len, ends)
        return host_round.lengths(1, [end + step + offset for end in host_round.accepted_ends()])

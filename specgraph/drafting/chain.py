"""The chain program: each step takes the token and the hidden state of the one before (EAGLE, EAGLE-3, reused MTP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from specgraph import kernels
from specgraph.attention import AdvancingAttention, AttentionBackend, AttentionMetadata, HostLengths, advance
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import HostRound
from specgraph.drafting.program import begin_rows, draft_one
from specgraph.graphs import MakeAttend
from specgraph.models.protocol import DraftHead


@dataclass(frozen=True, slots=True)
class ChainProgram:
    """Step 0 over the target's rows, then K - 1 steps of one row a request."""

    head: DraftHead
    attention: AttentionBackend
    config: DraftConfig
    position_offset: int = 0
    """How much further than the target's the rows stand (`OffsetHead`)."""
    steps_differ: bool = False
    prefill_steps: int = 1

    def num_steps(self, num_speculative_tokens: int) -> int:
        """K."""
        return num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """One row a request after step 0."""
        return PassRows(query_len, later=1, carried=1)

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        begin_rows(buffers, self.config.max_model_len, self.config.block_size, self.position_offset)
        hidden = self.head.combine(buffers.aux_hidden)
        out = self.head.forward(buffers.token_ids, hidden, make_attend(buffers.first, 0), buffers.last_rows)
        kernels.take_rows(out.carry, None, buffers.hidden)
        draft_one(self.head, buffers, out.hidden)

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """See `DraftProgram.step`."""
        advance(buffers.step, buffers.draft_step, self.config.max_model_len, self.config.block_size)
        if hasattr(self.attention, "after_advance"):  # an attribute, not the type: a wrapper must not hide it
            cast(AdvancingAttention, self.attention).after_advance(buffers.step, buffers.draft_step)
        out = self.head.forward(buffers.step_token_ids, buffers.hidden, make_attend(buffers.step, step))
        kernels.take_rows(out.carry, None, buffers.hidden)
        draft_one(self.head, buffers, out.hidden)

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """See `DraftProgram.prefill`."""
        self.head.forward(token_ids, self.head.combine(aux_hidden), make_attend(metadata, 0), last_row)

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. Only later steps need the accepted counts."""
        offset = self.position_offset
        if step == 0:
            ends = [start + host_round.query_len + offset for start in host_round.start_positions]
            return host_round.lengths(host_round.query_len, ends)
        return host_round.lengths(1, [end + step + offset for end in host_round.accepted_ends()])

"""The chain program: each step takes the token and the hidden state of the one before (EAGLE, EAGLE-3, reused MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from specgraph import ops
from specgraph.attention import advance
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend, Work
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.config import DraftConfig
from specgraph.draft.program import DraftProgram, begin_rows, draft_one
from specgraph.draft.round import RoundBuffers
from specgraph.models.protocol import DraftHead, DraftOutput, PairHead
from specgraph.ops.begin_rows import RowPlan
from specgraph.ops.linear import PairInput


class ChainProgram(DraftProgram[DraftHead]):
    """Step 0 over the target's rows, then K - 1 steps of one row per request."""

    def __init__(
        self, head: DraftHead, stack: AttentionStack, config: DraftConfig, memory: RoundBuffers, position_offset: int
    ) -> None:
        """position_offset: how much further than the target's rows the head's rows are (1: `draft_model`)."""
        self.position_offset = position_offset
        super().__init__(head, stack, config, memory)

    def passes(self, num_speculative_tokens: int) -> int:
        """K."""
        return num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """One row per request after step 0."""
        plan = RowPlan(
            query_len,
            self.config.max_model_len,
            self.config.block_size,
            later_rows=num_speculative_tokens - 1,
            slots_of_rejected=True,
            position_offset=self.position_offset,
        )
        return PassRows(plan, query_len, later=1, carried=1)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> Tensor:
        """See `DraftProgram.first`."""
        out = self._first_rows(b, make_attend)
        draft_one(self.head, b, out.hidden)
        return out.carry

    def _first_rows(self, b: DraftBuffers, make_attend: MakeAttend) -> DraftOutput:
        begin_rows(b, b.first_rows)
        hidden = self.head.combine(b.inputs.aux_hidden)
        return self.head.forward(b.token_ids, hidden, make_attend(b.first, 0), b.last_rows)

    def work_of(self, batch: BatchDescriptor) -> Work:
        """The steps; where all are in one launch, one op ends a step and begins the next."""
        apart, following = super().work_of(batch), self.joined_steps()
        if following is None:
            return apart
        head, pair = following
        b = self.sliced(batch)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            if len(steps) == 1:
                apart(steps, make_attend)
                return
            out = self._first_rows(b, make_attend)
            for step in steps[1:]:
                taken = self._next_step(b, pair, out)
                out = head.forward(b.step_token_ids, out.carry, make_attend(b.step, step), pair=taken)
            draft_one(head, b, out.hidden)
            ops.take_rows(out.carry, None, b.hidden)

        return work

    def joined_steps(self) -> tuple[PairHead, PairInput] | None:
        """The head, and what its first linear takes, where one op may prepare it; None where single ops do."""
        pair, out = self.head.pair_input, self.head.projection
        sampled = self.buffers.draft_probs is not None or self.buffers.sampling is not None
        if pair is None or out is None or out.is_split or sampled or self.stack.backend.after_advance is not None:
            return None
        return cast(PairHead, self.head), pair

    def _next_step(self, b: DraftBuffers, pair: PairInput, out: DraftOutput) -> Tensor:
        """Pick a token per request and move one on: the input of the next step's first linear [R, E + hidden_size]."""
        logits = self.head.projection
        assert logits is not None
        return ops.greedy_next_step(
            out.hidden,
            logits.head,
            ops.Drafts(b.draft_token_ids, self.head.draft_to_target, b.draft_step, b.step_token_ids),
            b.step.seq_lens,
            b.step.positions,
            b.step.slot_mapping,
            b.step.block_table,
            self.config.max_model_len,
            self.config.block_size,
            pair.table,
            pair.table_norm,
            out.carry,
            pair.hidden_norm,
            pair.eps,
        )

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        """See `DraftProgram.step`."""
        advance(b.step, b.draft_step, self.config.max_model_len, self.config.block_size)
        if (after_advance := self.stack.backend.after_advance) is not None:
            after_advance(b.step, b.draft_step)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, step))
        draft_one(self.head, b, out.hidden)
        return out.carry

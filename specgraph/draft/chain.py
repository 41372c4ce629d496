"""The chain program: a draft step takes the token and hidden state of the one before (EAGLE, EAGLE-3, reused MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from specgraph import ops
from specgraph.attention.choose import check_trees
from specgraph.attention.rows import VerifiedRows
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend
from specgraph.config import DraftConfig
from specgraph.draft.buffers import Allocation, PassRows
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.program import computed_tokens
from specgraph.draft.protocol import DraftHead, DraftOutput, PairHead
from specgraph.draft.stepping import ChainBuffers, SteppingProgram, draft_one, forward_first, step_fields
from specgraph.draft.tree import TreeProgram
from specgraph.errors import ConfigError
from specgraph.ops.linear import PairInput
from specgraph.user_code import users_code


class ChainProgram(SteppingProgram[DraftHead, ChainBuffers]):
    """Draft step 0 over the rows of the target's pass, then K - 1 draft steps of one row per request."""

    def allocate(self, new: Allocation) -> ChainBuffers:
        return ChainBuffers(**step_fields(new))

    def num_steps(self, batch: BatchDescriptor) -> int:
        return computed_tokens(batch)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        later, offset = num_speculative_tokens - 1, self.position_offset
        plan = VerifiedRows.of(query_len, self.config.limits, later, offset)
        return PassRows(plan, {"first": query_len, "later": 1, "carried": 1})

    def first(self, b: ChainBuffers, make_attend: MakeAttend) -> Tensor:
        out = forward_first(self.head, b, make_attend)
        draft_one(self.head, b, out.hidden)
        return out.carry

    def run(self, b: ChainBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        """Run the draft steps of one launch. If a launch has several, one op can end a step and begin the next one:
        `ops.greedy_next_step`. Otherwise the ops of its reference run one by one."""
        following = self.joined_steps()
        if following is None or len(steps) == 1:
            super().run(b, steps, make_attend)
            return
        head, pair = following
        out = forward_first(head, b, make_attend)
        for step in steps[1:]:
            taken = self._next_step(b, pair, out)
            out = head.forward(b.step_token_ids, out.carry, make_attend(b.step, step), pair=taken)
        draft_one(head, b, out.hidden)
        ops.take_rows(out.carry, None, b.hidden)

    def joined_steps(self) -> tuple[PairHead, PairInput] | None:
        """Return the head and its `pair_input` if one op can end a draft step and begin the next one. Otherwise None:
        each part is an op of its own."""
        pair, out = self.head.pair_input, self.head.projection
        sampled = self.buffers.draft_probs is not None or self.buffers.sampling is not None
        if pair is None or out is None or out.split_over or sampled or self.stack.backend.after_advance is not None:
            return None
        return cast(PairHead, self.head), pair

    def _next_step(self, b: ChainBuffers, pair: PairInput, out: DraftOutput) -> Tensor:
        """Pick a token per request, and move each request one position on. Returns the input of the next draft step's
        first linear, [R, E + hidden_size]."""
        logits = self.head.projection
        assert logits is not None
        return ops.greedy_next_step(
            out.hidden,
            logits.lm_head,
            ops.Drafts(b.draft_token_ids, self.head.draft_to_target, b.draft_step, b.step_token_ids),
            b.step.seq_lens,
            b.step.positions,
            b.step.slot_mapping,
            b.step.block_table,
            *self.config.limits,
            out.carry,
            pair,
        )

    def step(self, b: ChainBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        at = b.step
        places = at.seq_lens, at.positions, at.slot_mapping, b.draft_step, at.block_table
        ops.advance(*places, *self.config.limits)
        if (after_advance := self.stack.backend.after_advance) is not None:
            with users_code(f"attention '{self.stack.backend.name}'.after_advance failed", ConfigError):
                after_advance(b.step, b.draft_step)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, step))
        draft_one(self.head, b, out.hidden)
        return out.carry


class ChainKind(Kind[DraftHead]):
    """See `DraftHead`."""

    protocol = DraftHead
    chains = ChainProgram
    trees = TreeProgram

    def check_limits(self, head: DraftHead, config: DraftConfig, stack: AttentionStack) -> None:
        super().check_limits(head, config, stack)
        if config.tree is not None:
            check_trees(stack.backend, head.attention_layers, head.dtype, config.block_size)

    def check(self, check: HeadCheck) -> None:
        check.chain()


class DraftModelKind(ChainKind):
    """A chain drafted by an ordinary language model: a row stores its key at the position of the token it takes."""

    position_offset = 1

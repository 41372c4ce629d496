"""The tree program: like a chain, but each step expands the k best nodes of the step before by k tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.rows import Reached, RoundRows
from specgraph.buffers import PerRequest
from specgraph.capture import BatchDescriptor, MakeAttend
from specgraph.config import DraftTree
from specgraph.draft.buffers import Allocation, PassRows
from specgraph.draft.program import present
from specgraph.draft.protocol import DraftHead
from specgraph.draft.stepping import ChainBuffers, SteppingProgram, forward_first, step_fields


@dataclass(frozen=True, kw_only=True)
class TreeBuffers(ChainBuffers):
    """The tensors of trees that are drawn step by step; see `ops.grow_tree`."""

    candidates: ops.Candidates
    beams: ops.Beams
    """The nodes that the next step expands; tokens and ancestors are those of the rows of a later step."""
    base_lens: PerRequest
    """int32 [R]: keys up to the last accepted token's row; 0 for inert requests."""
    base_positions: PerRequest
    """int64 [R]: the position of that row."""

    @property
    def reached(self) -> Reached:
        return Reached(self.last_rows, self.base_positions, self.base_lens, self.draft_step)


class TreeProgram(SteppingProgram[DraftHead, TreeBuffers]):
    """Step 0 over the target's rows, then S - 1 steps of k rows per request; at the end the nodes to verify.

    The rows of a later step attend to the context and to their own ancestors, whose keys lie in slots behind the
    context: those of the next round's tokens, which step 0 then overwrites.
    """

    def allocate(self, new: Allocation) -> TreeBuffers:
        n, shape, common = new.requests, self.shape, step_fields(new, self.shape.step_keys)
        drawn, expanded = (n, shape.num_candidates), (n, shape.top_k)
        of_rows = new.rows("later"), common["step_token_ids"], common["step"].ancestors
        return TreeBuffers(
            **common,
            candidates=ops.Candidates(new.zeros(*drawn, dtype=torch.float32), new.zeros(*drawn), new.zeros(*drawn)),
            beams=ops.Beams(new.zeros(*expanded, dtype=torch.float32), new.zeros(*expanded), *of_rows),
            base_lens=new.zeros(n, dtype=torch.int32),
            base_positions=new.zeros(n),
        )

    def num_steps(self, batch: BatchDescriptor) -> int:
        return batch.num_speculative_tokens

    @property
    def shape(self) -> DraftTree:
        """The trees that it draws: S steps, k nodes expanded by each."""
        return present(self.tree)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return k rows per request after step 0."""
        k, offset = self.shape.top_k, self.position_offset
        later = (self.shape.num_steps - 1) * k
        plan = RoundRows.of(query_len, self.config.limits, later, offset)
        return PassRows(plan, {"first": query_len, "later": k, "carried": k})

    def first(self, b: TreeBuffers, make_attend: MakeAttend) -> None:
        out = forward_first(self.head, b, make_attend)
        self._grow(b, out.hidden, out.carry, first=True)

    def step(self, b: TreeBuffers, make_attend: MakeAttend, step: int) -> None:
        ops.advance_tree(
            b.base_lens,
            b.base_positions,
            b.step.block_table,
            tree_len=self.shape.step_keys,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            seq_lens=b.step.seq_lens,
            positions=b.step.positions,
            slot_mapping=b.step.slot_mapping,
            draft_step=b.draft_step,
        )
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, step))
        self._grow(b, out.hidden, out.carry, first=False)

    def run(self, b: TreeBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        """Run the steps, and at the end of each launch choose the nodes to verify: the last choice stands."""
        super().run(b, steps, make_attend)
        ops.choose_nodes(b.candidates, ops.TreeNodes(b.draft_token_ids, present(b.draft_parents)))

    def make_inert(self) -> None:
        """Let no request have sampled a token, and no later step have a live request."""
        super().make_inert()
        self.buffers.base_lens.zero_()

    def _grow(self, b: TreeBuffers, hidden: Tensor, carry: Tensor, first: bool) -> None:
        """Add the candidates of a step, and hand each row of the next step what it follows."""
        ops.grow_tree(
            self.head.logits(hidden),
            self.head.draft_to_target,
            b.draft_step,
            first,
            b.candidates,
            b.beams,
        )
        ops.take_rows(carry, b.beams.rows, b.hidden)

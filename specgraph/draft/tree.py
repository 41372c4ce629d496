"""The tree program: like a chain, but each step expands the k best nodes of the step before by k tokens each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specgraph import ops
from specgraph.capture import BatchDescriptor, MakeAttend
from specgraph.config import DraftTree
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.chain import forward_round
from specgraph.draft.program import DraftProgram, present
from specgraph.draft.protocol import DraftHead
from specgraph.ops.begin_rows import RowPlan


class TreeProgram(DraftProgram[DraftHead]):
    """Step 0 over the target's rows, then S - 1 steps of k rows per request; at the end the nodes to verify.

    The rows of a later step attend to the context and to their own ancestors, whose keys lie in slots behind the
    context: those of the next round's tokens, which step 0 then overwrites.
    """

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
        plan = RowPlan(query_len, *self.config.limits, later_rows=later, slots_of_rejected=True, position_offset=offset)
        return PassRows(plan, query_len, later=k, carried=k, tree_keys=self.shape.step_keys)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        out = forward_round(self.head, b, make_attend)
        self._grow(b, out.hidden, out.carry, first=True)

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        tree = present(b.tree)
        ops.advance_tree(
            tree.base_lens,
            tree.base_positions,
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

    def run(self, b: DraftBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        """Run the steps, and at the end of each launch choose the nodes to verify: the last choice stands."""
        super().run(b, steps, make_attend)
        ops.choose_nodes(present(b.tree).candidates, ops.TreeNodes(b.draft_token_ids, present(b.draft_parents)))

    def make_inert(self) -> None:
        """Let no request have sampled a token, and no later step have a live request."""
        super().make_inert()
        present(self.buffers.tree).base_lens.zero_()

    def _grow(self, b: DraftBuffers, hidden: Tensor, carry: Tensor, first: bool) -> None:
        """Add the candidates of a step, and hand each row of the next step what it follows."""
        tree = present(b.tree)
        ops.grow_tree(
            self.head.logits(hidden),
            self.head.draft_to_target,
            b.draft_step,
            first,
            tree.candidates,
            tree.beams,
        )
        ops.take_rows(carry, tree.beams.rows, b.hidden)

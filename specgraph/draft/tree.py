"""The tree program: like a chain, but each draft step expands the k best nodes of the one before by k tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.rows import Reached, VerifiedRows
from specgraph.buffers import PerRequest
from specgraph.capture import BatchDescriptor, MakeAttend
from specgraph.config import DraftTree
from specgraph.draft.buffers import Allocation, PassRows
from specgraph.draft.program import present
from specgraph.draft.protocol import DraftHead
from specgraph.draft.stepping import ChainBuffers, SteppingProgram, forward_first, step_fields


@dataclass(frozen=True, kw_only=True)
class TreeBuffers(ChainBuffers):
    """The tensors of trees that grow step by step; see `ops.grow_tree`."""

    candidates: ops.Candidates
    beams: ops.Beams
    """The nodes that the next draft step expands. Their tokens and ancestors share the memory of that step's rows."""
    base_lens: PerRequest
    """int32 [R]: the number of keys up to the row of the last accepted token; 0 for inert requests."""
    base_positions: PerRequest
    """int64 [R]: the position of the row of the last accepted token."""

    @property
    def reached(self) -> Reached:
        return Reached(self.last_rows, self.base_positions, self.base_lens, self.draft_step)


class TreeProgram(SteppingProgram[DraftHead, TreeBuffers]):
    """Draft step 0 over the rows of the target's pass, then S - 1 steps of k rows per request. The best nodes of all
    steps are the tree to verify.

    The rows of a later step attend to the context and to their own ancestors. The ancestors' keys lie in the slots
    after the context. The next tokens of the text get these slots, and draft step 0 of the next propose overwrites
    them.
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
        """The shape of its trees: S draft steps, and k expanded nodes per step."""
        return present(self.tree)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows: query_len per request in draft step 0, k in each later one."""
        k, offset = self.shape.top_k, self.position_offset
        later = (self.shape.num_steps - 1) * k
        plan = VerifiedRows.of(query_len, self.config.limits, later, offset)
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
        """Run the draft steps of one launch, then choose the nodes to verify. The last launch's choice stands."""
        super().run(b, steps, make_attend)
        ops.choose_nodes(b.candidates, ops.TreeNodes(b.draft_token_ids, present(b.draft_parents)))

    def make_inert(self) -> None:
        """Make every request inert, in the later draft steps too."""
        super().make_inert()
        self.buffers.base_lens.zero_()

    def _grow(self, b: TreeBuffers, hidden: Tensor, carry: Tensor, first: bool) -> None:
        """Add the candidates of a draft step, and give each row of the next step its parent's hidden state."""
        ops.grow_tree(
            self.head.logits(hidden),
            self.head.draft_to_target,
            b.draft_step,
            first,
            b.candidates,
            b.beams,
        )
        ops.take_rows(carry, b.beams.rows, b.hidden)

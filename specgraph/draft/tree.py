"""The tree program: like a chain, but each step expands the k best nodes of the step before by k tokens each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specgraph import ops
from specgraph.attention import HostLengths, check_trees
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend, Work
from specgraph.draft.buffers import DraftBuffers, PassRows, TreeBuffers
from specgraph.draft.config import DraftConfig
from specgraph.draft.host_lengths import HostRound
from specgraph.draft.program import DraftProgram, begin_rows
from specgraph.draft.round import RoundBuffers
from specgraph.draft.shapes import DraftTree
from specgraph.models.protocol import DraftHead
from specgraph.ops.begin_rows import RowPlan


class TreeProgram(DraftProgram[DraftHead]):
    """Step 0 over the target's rows, then S - 1 steps of k rows per request; at the end the nodes to verify.

    The rows of a later step attend to the context and to their own ancestors, whose keys lie in slots behind the
    context: those of the next round's tokens, which step 0 then overwrites.
    """

    def __init__(
        self,
        head: DraftHead,
        stack: AttentionStack,
        config: DraftConfig,
        tree: DraftTree,
        memory: RoundBuffers,
        position_offset: int,
    ) -> None:
        """
        Args:
            memory: what the target's rounds leave.
            position_offset: how much further than the target's rows the head's rows are (1: `draft_model`).

        Raises:
            UnsupportedError: the attention has no ancestor mask.
        """
        check_trees(stack.backend, head.attention_layers, head.dtype, config.block_size)
        self.position_offset = position_offset
        super().__init__(head, stack, config, memory, tree)

    @property
    def shape(self) -> DraftTree:
        """Of the trees that it draws: S steps, k nodes expanded by each."""
        assert self.tree is not None
        return self.tree

    @property
    def later_rows(self) -> int:
        """Rows per request of a later step: k."""
        return self.shape.top_k

    def passes(self, num_speculative_tokens: int) -> int:
        """S."""
        return num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """k rows per request after step 0."""
        k = self.shape.top_k
        plan = RowPlan(
            query_len,
            self.config.max_model_len,
            self.config.block_size,
            later_rows=(self.shape.num_steps - 1) * k,
            slots_of_rejected=True,
            position_offset=self.position_offset,
        )
        return PassRows(plan, query_len, later=k, carried=k, tree_keys=self.shape.step_keys)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        begin_rows(b, b.first_rows)
        hidden = self.head.combine(b.inputs.aux_hidden)
        out = self.head.forward(b.token_ids, hidden, make_attend(b.first, 0), b.last_rows)
        self._grow(b, out.hidden, out.carry, first=True)

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """See `DraftProgram.step`."""
        tree = _tree(b)
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

    def work_of(self, batch: BatchDescriptor) -> Work:
        """The steps, and at the end of each launch the choice of the nodes to verify: the last choice stands."""
        b = self.sliced(batch)
        tree, parents, grow = _tree(b), b.draft_parents, super().work_of(batch)
        assert parents is not None

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            grow(steps, make_attend)
            ops.choose_nodes(tree.candidates, ops.TreeNodes(b.draft_token_ids, parents))

        return work

    def make_inert(self) -> None:
        """No request sampled a token, and no later step has a live request."""
        super().make_inert()
        _tree(self.buffers).base_lens.zero_()

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """Not called: attention with an ancestor mask takes its lengths from the device."""
        raise AssertionError("trees need attention with device lengths")

    def _grow(self, b: DraftBuffers, hidden: Tensor, carry: Tensor, first: bool) -> None:
        """Add the candidates of a step, and hand each row of the next step what it follows."""
        tree, ancestors = _tree(b), b.step.ancestors
        assert ancestors is not None
        ops.grow_tree(
            self.head.logits(hidden),
            self.head.draft_to_target,
            b.draft_step,
            first,
            tree.candidates,
            ops.Beams(tree.beam_scores, tree.beam_nodes, tree.beam_rows, b.step_token_ids, ancestors),
        )
        ops.take_rows(carry, tree.beam_rows, b.hidden)


def _tree(b: DraftBuffers) -> TreeBuffers:
    assert b.tree is not None
    return b.tree

"""The draft program: plain tensor code for one propose, written once for every lowering.

It knows no device, no graph and no lowering. It reads and writes persistent buffers, so a replay of a captured launch
runs the same ops as an eager call. The lowering decides which draft steps are in one launch: all of them in eager and
merged, one per launch in piecewise and step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from torch import Tensor

from specgraph import ops
from specgraph.attention import HostLengths
from specgraph.attention.caches import num_blocks
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend, Phase, Program, StepKind, Work
from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.batch import SharedBuffers, copy_batch
from specgraph.draft.bound import BoundTensors
from specgraph.draft.buffers import Allocation, DraftBuffers, PassRows, PromptRows
from specgraph.draft.host_lengths import HostNumbers
from specgraph.draft.logits import most_likely
from specgraph.draft.protocol import Head, ModelHead
from specgraph.ops import noise

HeadT = TypeVar("HeadT", bound=Head, covariant=True)
BuffersT = TypeVar("BuffersT", bound=DraftBuffers)
T = TypeVar("T")


class DraftProgram(Program, Generic[HeadT, BuffersT]):
    """The computation of one propose with one kind of head: a list of draft steps, which a lowering cuts into launches.

    A subclass defines the rows and the computation of each draft step.
    """

    phase: Phase = "propose"
    step_kind: StepKind = "alike"

    def __init__(
        self,
        head: HeadT,
        stack: AttentionStack,
        config: DraftConfig,
        memory: SharedBuffers,
        tree: DraftTree | None = None,
        position_offset: int = 0,
    ) -> None:
        """memory: the target's results, which all programs of a drafter share. tree: the shape of the trees to draft;
        None for chains. position_offset: see `Kind.position_offset`."""
        self.position_offset = position_offset
        self.head, self.stack, self.config, self.tree = head, stack, config, tree
        self.bound: dict[int, BoundTensors] = {}
        """Bound tensors by their number. If a batch has a `binding`, draft step 0 copies these tensors first."""
        lens = config.query_lens  # K + 1 for every K, ascending
        passes = [self.rows(after, max(1, k - 1)) for after in lens for k in lens]
        self.buffers = self.allocate(Allocation(config, passes, head, memory, tree, num_blocks(stack.caches)))

    @abstractmethod
    def allocate(self, new: Allocation) -> BuffersT:
        """Return the buffers of the largest batch."""

    @property
    def later_rows(self) -> int:
        """Rows per request of a later draft step: 1 in a chain, one per expanded node in a tree."""
        return 1 if self.tree is None else self.tree.top_k

    @property
    def prefill_passes(self) -> int:
        """The number of forward passes with attention in a prefill: one per module that a prompt runs through."""
        return 1

    @property
    def has_row_of_last_draft(self) -> bool:
        """True if the last draft token has a row of its own, so that its key is written."""
        return False

    @property
    def look_ahead(self) -> int:
        """The number of tokens past its rows that a prefill takes: module k takes the token k places further on."""
        return max(0, self.prefill_passes - 1)

    @abstractmethod
    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows per request of a propose, if the target's pass had `query_len` rows per request."""

    @abstractmethod
    def first(self, b: BuffersT, make_attend: MakeAttend) -> Tensor | None:
        """Run draft step 0: from the target's results to the first draft token, or to all of them.

        b: the buffers, sliced to the padded batch, its rows and its K.
        """

    def run(self, b: BuffersT, steps: Sequence[int], make_attend: MakeAttend) -> None:
        """Run the draft steps of one launch."""
        for step in steps:
            assert step == 0, f"{type(self).__name__} has no step {step}"
            self.first(b, make_attend)

    @abstractmethod
    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        """Write the drafter's KV of prompt rows. Nothing is drafted."""

    def host_lengths(self, step: int, host_numbers: HostNumbers) -> HostLengths:
        """Return the lengths of a draft step. They equal the device metadata, since both follow from the same plan."""
        plan = self.rows(host_numbers.query_len, max(1, host_numbers.num_speculative_tokens)).plan
        return host_numbers.first(plan) if step == 0 or self.step_kind == "distinct" else host_numbers.later(plan, step)

    def batches(self) -> list[BatchDescriptor]:
        """Return the descriptors to capture, largest first: each captured size that drafts with this program, with each
        query_len, for the drafter's own memory and for each set of bound tensors."""
        return [
            BatchDescriptor("propose", size, query_len, shape.num_speculative_tokens, tree=shape.tree, binding=binding)
            for binding in (0, *self.bound)
            for size in reversed(self.config.sizes)
            for shape in reversed(self.config.shapes_at(size))
            if shape.tree == (self.tree is not None)
            for query_len in reversed(self.config.query_lens)
        ]

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the draft steps of a batch as a function. Draft step 0 begins with the copy of bound tensors."""
        k, bound, config = computed_tokens(batch), self.bound.get(batch.binding), self.config
        b = self.sliced(batch.num_requests, batch.query_len, k)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            if bound is not None and min(steps, default=0) == 0:
                source = bound.sliced(batch.num_requests, batch.query_len)
                copy_batch(ops.load_batch, source, b.inputs, b.inputs, config.keeps_draft_probs)
            self.run(b, steps, make_attend)

        return work

    def sliced(self, num_requests: int, query_len: int, num_speculative_tokens: int) -> BuffersT:
        """Return views of the buffers, for the first `num_requests` requests and K draft tokens each.

        query_len: rows per request of the target's pass.
        """
        rows, whole = self.rows(query_len, max(1, num_speculative_tokens)), self.buffers
        drafts = num_speculative_tokens if whole.draft_parents is None else whole.draft_parents.shape[1]
        views = whole.views(num_requests, drafts=drafts, **rows.sizes)
        return replace(views, inputs=whole.shared.sliced(num_requests, query_len), plan=rows.plan)

    def make_inert(self) -> None:
        """Make every request inert. Bound tensors are made inert too, since a warm-up copies them."""
        for counts in (self.buffers.shared.num_sampled, *(each.num_sampled for each in self.bound.values())):
            counts.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return the buffers and bound tensors by name."""
        named = self.buffers.shared.named_tensors("shared")
        named |= self.buffers.named_tensors("buffers" if self.tree is None else "tree")
        for each in self.bound.values():
            named |= each.named_tensors()
        return named


def computed_tokens(batch: BatchDescriptor) -> int:
    """Return the number of draft tokens that are computed. With K = 0 it is 1: draft step 0 still runs for its KV, and
    its token is not handed out."""
    return max(1, batch.num_speculative_tokens)


def draw(
    head: ModelHead,
    b: DraftBuffers,
    hidden: Tensor,
    drafts: ops.Drafts,
    positions: tuple[Tensor, Tensor | None],
    drafted: Tensor | None = None,
) -> None:
    """Draw tokens from hidden states: the most likely ones, or by temperature and the other sampling parameters.

    Args:
        positions: `positions` and `more_positions` of the draws, see `ops.Draws`.
        drafted: int64 [R, K]: the draft tokens so far, for the sampling parameters. -1 stands for no token.
    """
    out, draws = head.projection, draws_of(b, positions)
    ranks = None if out is None else out.split_over
    if b.sampling is not None or out is None or (ranks is not None and draws is not None):
        draw_from_logits(head, b, head.logits(hidden), drafts, draws, drafted)
    elif ranks is not None:
        ops.write_drafts(most_likely(out.logits(hidden), ranks), drafts)
    else:
        ops.draft_from_hidden(hidden, out.lm_head, drafts, draws)


def draws_of(b: DraftBuffers, positions: tuple[Tensor, Tensor | None]) -> ops.Draws | None:
    """Return the arguments of a sampled draw. None if drafts are greedy."""
    if b.draft_probs is None:
        return None
    return ops.Draws(present(b.inputs.temperature), present(b.draft_seeds), *positions, b.draft_probs)


def draw_from_logits(
    head: ModelHead,
    b: DraftBuffers,
    logits: Tensor,
    drafts: ops.Drafts,
    draws: ops.Draws | None,
    drafted: Tensor | None,
) -> None:
    """Draw tokens from a head's logits, adjusted by the sampling parameters. Arguments as in `draw`."""
    if b.sampling is not None:
        temperature = present(b.inputs.temperature)
        logits = b.sampling.adjusted_drafts(logits, head.draft_to_target, temperature, drafted)
    ops.draft_from_logits(logits, drafts, draws)


def draft_block(head: ModelHead, b: DraftBuffers, hidden: Tensor, tree: DraftTree | None) -> None:
    """Draw K tokens per request, or a tree of K levels, from hidden states [R * K, hidden_size]. No draw depends on
    another one."""
    if tree is not None:
        nodes = ops.TreeNodes(b.draft_token_ids, present(b.draft_parents))
        ops.draft_block_tree(head.logits(hidden), head.draft_to_target, tree.top_k, nodes)
        return
    drafts = ops.Drafts(b.draft_token_ids, head.draft_to_target)
    draw(head, b, hidden, drafts, (b.inputs.start_positions, b.inputs.num_sampled))


def present(value: T | None) -> T:
    """Return `value`, which is not None here: the caller's buffers have this optional tensor."""
    assert value is not None
    return value


def make_seeds(b: DraftBuffers) -> None:
    """Write the seeds of this propose's draws. Nothing is written if drafts are greedy."""
    if b.draft_seeds is not None:
        batch = b.inputs
        noise.draft_seeds(present(batch.seeds), batch.start_positions + batch.num_sampled, b.draft_seeds)

"""The drafter's persistent tensors: all that a captured draft graph reads and writes, each with a name.

They are allocated once for the largest padded batch and only ever written in place. A batch works on views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, cast

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata
from specgraph.attention.metadata import allocate_metadata
from specgraph.attention.rows import Accepted, Reached
from specgraph.buffers import VIEW, Axes, Buffers, Once, PerDraft, PerRequest
from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.protocol import BlockHead, Head
from specgraph.draft.round import ProposeBatch, RoundBuffers
from specgraph.draft.sampling_buffers import SamplingBuffers
from specgraph.ops.begin_rows import RowPlan
from specgraph.ops.past_rows import PastRows

PerFirst = Annotated[Tensor, Axes("first")]
"""[R * rows of step 0, ...]"""
PerLater = Annotated[Tensor, Axes("later")]
"""[R * rows of a later pass, ...]"""
PerCarried = Annotated[Tensor, Axes("carried")]
"""[R * carried rows, ...]"""


class PassRows(NamedTuple):
    """Rows per request in the parts of one propose."""

    plan: RowPlan
    """The rows that begin a propose, made from the target's round."""
    first: int
    """Rows of step 0, or the context of a parallel drafter's block: the rows of the round, and those before it."""
    later: int
    """Rows of a later pass: 1 in a chain, k in a tree, 1 + K in a parallel block, query_len + K - 1 with masks."""
    carried: int
    """Hidden states that are kept from pass to pass."""
    tree_keys: int = 0
    """Keys behind the context that later passes write and mask by ancestors; 0 where none does."""


class PromptRows(NamedTuple):
    """T rows of prompts, as a drafter's prefill takes them."""

    token_ids: Tensor
    """int64 [T + look_ahead], the token after each row's position, and those that follow."""
    aux_hidden: Tensor
    """[T, aux_size], the target's hidden states of the rows."""
    metadata: AttentionMetadata
    last_row: Tensor | None = None
    """int64 [1], the last real row where the others are padding; None where every row is real."""


class TreeBuffers(NamedTuple):
    """Tensors of trees that are drawn step by step; see `ops.grow_tree`."""

    candidates: ops.Candidates
    beams: ops.Beams
    """The nodes that the next step expands; tokens and ancestors are those of `DraftBuffers.step`'s rows."""
    base_lens: PerRequest
    """int32 [R]: keys up to the last accepted token's row; 0 for inert requests."""
    base_positions: PerRequest
    """int64 [R]: the position of that row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBuffers(Buffers):
    """The tensors of a propose for R requests, query_len rows each, and K draft tokens."""

    round: Annotated[RoundBuffers, VIEW]
    """The memory of the target's round, for the largest batch."""
    inputs: Annotated[ProposeBatch, VIEW]
    """The same, for this batch: views."""
    plan: RowPlan
    """The rows that the propose begins with."""

    token_ids: PerFirst
    """int64 [R * first rows]: the input tokens of step 0."""
    last_rows: PerRequest
    """int64 [R]: the row of each request's last accepted token."""
    first: Annotated[AttentionMetadata, Axes("first")]
    """Metadata of step 0: the rows of the round, with several modules K - 1 past rows before them."""
    step: Annotated[AttentionMetadata, Axes("later")]
    """Metadata of the later passes: one row per request, moved on between steps; in a tree a row per expanded node; or
    a parallel drafter's block; or the round's rows and masked ones."""
    step_token_ids: PerLater
    """int64 [R * later rows]: the latest draft tokens, which the next step takes; or the tokens of the one pass."""
    hidden: PerCarried
    """[R * carried rows, hidden_size]: the hidden states carried from step to step."""
    draft_step: Once
    """int64 [1]: the column of `draft_token_ids` to write, counted on the device."""

    draft_token_ids: PerDraft
    """int64 [R, K], in trees [R, N - 1]: the result. Overwritten by the next propose."""
    draft_parents: PerRequest | None
    """int64 [R, N - 1]: the row that each node of a tree follows, see `ops.TreeNodes`; None for chains."""
    draft_probs: PerDraft | None
    """float32 [R, K, draft_vocab]: the distributions that sampled drafts were drawn from."""
    draft_seeds: PerRequest | None
    """int64 [R]: the seeds of this propose's draws, see `noise.draft_seeds`; None where drafts are greedy."""
    confidence: PerDraft | None
    """float32 [R, K]: the chance that each draft token is accepted; None where the head says nothing of it."""
    tree: TreeBuffers | None
    sampling: Annotated[SamplingBuffers | None, Axes(is_view=True)]
    """Parameters of sampling besides temperature and seed; None where drafts do not follow it."""
    past: PastRows | None
    """Tokens and hidden states of the rows before rounds; None where no module takes a drafted token."""

    @property
    def accepted(self) -> Accepted:
        """The round after acceptance."""
        r = self.inputs
        tokens = r.num_sampled, r.sampled_token_ids
        return Accepted(r.start_positions, r.block_table, *tokens, self.round.rows_without_block)

    @property
    def reached(self) -> Reached:
        """The place from which the steps after step 0 go on."""
        step, tree = self.step, self.tree
        reached = (step.positions, step.seq_lens) if tree is None else (tree.base_positions, tree.base_lens)
        return Reached(self.last_rows, *reached, self.draft_step)

    def sliced(self, num_requests: int, rows: PassRows, num_speculative_tokens: int) -> DraftBuffers:
        """Return the first `num_requests` requests of a batch with these rows and K: views of the same memory."""
        drafts = num_speculative_tokens if self.draft_parents is None else self.draft_parents.shape[1]
        sizes = {"first": rows.first, "later": rows.later, "carried": rows.carried, "drafts": drafts}
        inputs = self.round.sliced(num_requests, rows.first - rows.plan.past)
        return replace(self.views(num_requests, **sizes), inputs=inputs, plan=rows.plan)


def allocate_buffers(
    config: DraftConfig,
    passes: Sequence[PassRows],
    head: Head,
    memory: RoundBuffers,
    tree: DraftTree | None,
    num_blocks: int,
) -> DraftBuffers:
    """Allocate buffers for the largest batch of `config`, every request inert.

    Args:
        passes: the rows per request of every propose; the last one has the most.
        head: gives sizes and dtype.
        memory: what the target's rounds leave.
        tree: the shape of the trees that are drawn; None for chains.
        num_blocks: of each KV cache.
    """
    requests, steps, rows = config.max_num_requests, config.num_speculative_tokens, passes[-1]
    device = memory.seeds.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    nodes, keeps_probs = (steps, config.keeps_draft_probs) if tree is None else (tree.num_draft_tokens - 1, False)
    later = {1, *(each.later for each in passes)}  # a block has one row where K is 0
    step = allocate_metadata(requests, later, memory.block_table, rows.tree_keys)
    step_token_ids = zeros(requests * rows.later)
    growing = past = None
    if tree is not None and step.ancestors is not None:
        drawn, expanded = (requests, tree.num_candidates), (requests, tree.top_k)
        of_rows = zeros(requests * tree.top_k), step_token_ids, step.ancestors
        growing = TreeBuffers(
            ops.Candidates(zeros(*drawn, dtype=torch.float32), zeros(*drawn), zeros(*drawn)),
            ops.Beams(zeros(*expanded, dtype=torch.float32), zeros(*expanded), *of_rows),
            base_lens=zeros(requests, dtype=torch.int32),
            base_positions=zeros(requests),
        )
    if rows.plan.past:
        kept = kept_rows(steps, config.block_size)
        past = PastRows(
            token_ids=zeros(num_blocks, kept),
            positions=zeros(num_blocks, kept) - 1,
            hidden=zeros(num_blocks, kept, head.hidden_size, dtype=head.dtype),
        )
    return DraftBuffers(
        round=memory,
        inputs=memory.sliced(requests, rows.first - rows.plan.past),
        plan=rows.plan,
        token_ids=zeros(requests * rows.first),
        last_rows=zeros(requests),
        first=allocate_metadata(requests, {each.first for each in passes}, memory.block_table),
        step=step,
        step_token_ids=step_token_ids,
        hidden=zeros(requests * rows.carried, head.hidden_size, dtype=head.dtype),
        draft_step=zeros(1),
        draft_token_ids=zeros(requests, nodes),
        draft_parents=None if tree is None else zeros(requests, nodes),
        draft_probs=zeros(requests, steps, head.draft_vocab_size, dtype=torch.float32) if keeps_probs else None,
        draft_seeds=zeros(requests) if keeps_probs else None,
        confidence=zeros(requests, steps, dtype=torch.float32) if says_confidence(head) else None,
        tree=growing,
        sampling=memory.sampling,
        past=past,
    )


def says_confidence(head: Head) -> bool:
    """Return whether a head says how likely its draft tokens are accepted."""
    return head.kind == "block" and cast(BlockHead, head).has_confidence


def kept_rows(num_speculative_tokens: int, block_size: int) -> int:
    """Return how many past rows are kept per KV block: K - 1, or the block size where that is less."""
    return min(num_speculative_tokens - 1, block_size)


def past_rows_bytes(head: Head, num_speculative_tokens: int, block_size: int) -> int:
    """Return the bytes of past rows per KV block, beside the KV; 0 for a drafter whose one module serves every step."""
    if head.kind != "modules":
        return 0
    return kept_rows(num_speculative_tokens, block_size) * (head.hidden_size * head.dtype.itemsize + 16)

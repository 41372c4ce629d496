"""The drafter's persistent tensors, by name: all tensors that a captured draft graph reads and writes.

They are allocated once, for the largest padded batch, and only ever written in place. A batch uses views of them. Each
kind of drafter adds the tensors of its own passes, in the file of its program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from specgraph.attention import AttentionMetadata
from specgraph.attention.metadata import allocate_metadata
from specgraph.attention.rows import Accepted
from specgraph.buffers import VIEW, Axes, Buffers, PerDraft, PerRequest
from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.batch import ProposeBatch, SharedBuffers
from specgraph.draft.protocol import Head, LogitsAdjustment
from specgraph.ops.begin_rows import RowInputs, RowPlan


class PassRows(NamedTuple):
    """The rows per request of one propose."""

    plan: RowPlan
    """The plan of the rows of draft step 0. They are filled from the target's results."""
    sizes: Mapping[str, int]
    """Rows per request by part of the propose. The part names are the axis names of the program's buffers."""


class PromptRows(NamedTuple):
    """T rows of prompts: the input of a drafter's prefill."""

    token_ids: Tensor
    """int64 [T + look_ahead]: the token after each row's position, then `look_ahead` more tokens."""
    aux_hidden: Tensor
    """[T, aux_size]: the target's hidden states of the rows."""
    metadata: AttentionMetadata
    last_row: Tensor | None = None
    """int64 [1]: the last real row; the rows after it are padding. None if every row is real."""


@dataclass(frozen=True, kw_only=True)
class DraftBuffers(Buffers):
    """The tensors that every kind of drafter has, for R requests and K draft tokens."""

    shared: Annotated[SharedBuffers, VIEW]
    """The memory of the target's results, for the largest batch."""
    inputs: Annotated[ProposeBatch, VIEW]
    """Views of `shared` for this batch."""
    plan: RowPlan
    """See `PassRows.plan`."""
    draft_token_ids: PerDraft
    """int64 [R, K], in trees [R, N - 1]: the result, which the next propose overwrites."""
    draft_parents: PerRequest | None
    """int64 [R, N - 1]: the row that each node of a tree follows, see `ops.TreeNodes`. None for chains."""
    draft_probs: PerDraft | None
    """float32 [R, K, draft_vocab]: the distributions that drafts were drawn from. None if drafts are greedy."""
    draft_seeds: PerRequest | None
    """int64 [R]: the seeds of this propose's draws, see `noise.draft_seeds`. None if drafts are greedy."""
    confidence: PerDraft | None = None
    """float32 [R, K]: see `DraftTokens.confidence`."""
    sampling: Annotated[LogitsAdjustment | None, Axes(is_view=True)]
    """See `SharedBuffers.sampling`."""

    @property
    def accepted(self) -> Accepted:
        """The target's results in the form that row plans take."""
        r = self.inputs
        inputs = RowInputs(r.start_positions, r.block_table, num_sampled=r.num_sampled, token_ids=r.sampled_token_ids)
        return Accepted(inputs, self.shared.rows_without_block)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Allocates the buffers of one draft program for the largest batch. Every request is inert."""

    config: DraftConfig
    passes: Sequence[PassRows]
    """The rows per request of each propose that the config allows. The last entry has the most rows."""
    head: Head
    memory: SharedBuffers
    tree: DraftTree | None
    num_blocks: int
    """Blocks of each KV cache."""

    @property
    def requests(self) -> int:
        """R: the requests of the largest batch."""
        return self.config.max_num_requests

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.memory.seeds.device)

    def rows(self, part: str, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return zeros, [R * rows of the part, *shape]."""
        return self.zeros(self.requests * self.passes[-1].sizes[part], *shape, dtype=dtype)

    def hidden(self, part: str) -> Tensor:
        """Return zeros for hidden states, [R * rows of the part, hidden_size]."""
        return self.rows(part, self.head.hidden_size, dtype=self.head.dtype)

    def metadata(self, part: str, tree_keys: int = 0) -> AttentionMetadata:
        """Return metadata for the rows of a part.

        tree_keys: the number of keys behind the context that the rows write and mask by ancestors; 0 without a tree.
        """
        lens = {each.sizes[part] for each in self.passes}
        return allocate_metadata(self.requests, lens, self.memory.block_table, tree_keys)

    def common(self) -> dict[str, Any]:
        """Return the fields of `DraftBuffers`, as arguments of a subclass."""
        config, tree, n, zeros = self.config, self.tree, self.requests, self.zeros
        steps, vocab = config.num_speculative_tokens, self.head.draft_vocab_size
        nodes, keeps_probs = (steps, config.keeps_draft_probs) if tree is None else (tree.num_draft_tokens - 1, False)
        return {
            "shared": self.memory,
            "inputs": self.memory.sliced(n, config.query_lens[-1]),
            "plan": self.passes[-1].plan,
            "draft_token_ids": zeros(n, nodes),
            "draft_parents": None if tree is None else zeros(n, nodes),
            "draft_probs": zeros(n, steps, vocab, dtype=torch.float32) if keeps_probs else None,
            "draft_seeds": zeros(n) if keeps_probs else None,
            "sampling": self.memory.sampling,
        }


@dataclass(frozen=True, kw_only=True)
class OnePassBuffers(DraftBuffers):
    """The rows of the one pass."""

    step: Annotated[AttentionMetadata, Axes("block")]
    step_token_ids: Annotated[Tensor, Axes("block")]
    """int64 [R * rows of the pass]"""


def pass_fields(new: Allocation) -> dict[str, Any]:
    """Return the fields of `OnePassBuffers`, as arguments of a subclass."""
    return new.common() | {"step": new.metadata("block"), "step_token_ids": new.rows("block")}

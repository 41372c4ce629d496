"""The n-gram program: it searches each request's own text for an earlier place of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata
from specgraph.attention.rows import TextRows
from specgraph.buffers import Axes, PerRequest
from specgraph.capture import BatchDescriptor, MakeAttend, StepKind
from specgraph.draft.buffers import Allocation, DraftBuffers, PassRows, PromptRows
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.ngram_head import NgramHead
from specgraph.draft.program import DraftProgram


@dataclass(frozen=True, kw_only=True)
class NgramBuffers(DraftBuffers):
    """The tensors of a search in texts."""

    plan: TextRows
    token_ids: Annotated[Tensor, Axes("text")]
    """int64 [R * query_len]: the tokens of the batch's rows."""
    text: Annotated[AttentionMetadata, Axes("text")]
    """The positions and slots of these tokens in the texts."""
    lens: PerRequest
    """int32 [R]: the number of tokens in each text; 0 for inert requests."""


class NgramProgram(DraftProgram[NgramHead, NgramBuffers]):
    """Appends the sampled tokens to each request's text, then searches the text. There is no attention.

    Each token is stored at its own position; EAGLE heads store its key one position earlier.
    """

    step_kind: StepKind = "together"

    @property
    def prefill_passes(self) -> int:
        """0: a prompt's tokens are stored without attention."""
        return 0

    def allocate(self, new: Allocation) -> NgramBuffers:
        lens = new.zeros(new.requests, dtype=torch.int32)
        return NgramBuffers(**new.common(), token_ids=new.rows("text"), text=new.metadata("text"), lens=lens)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows of the target's pass. Rejected rows get no slot, so their tokens enter no text."""
        return PassRows(TextRows.of(query_len, self.config.limits, self.position_offset), {"text": query_len})

    def num_steps(self, batch: BatchDescriptor) -> int:
        return 0

    def run(self, b: NgramBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        self.first(b, make_attend)

    def first(self, b: NgramBuffers, make_attend: MakeAttend) -> None:
        b.plan.fill(b.accepted, b.text.places, b.token_ids, b.lens)
        ops.keep_tokens(b.token_ids, b.text.slot_mapping, self._history)
        limits = self.head.prompt_lookup_min, self.head.prompt_lookup_max, self.config.max_model_len
        ops.ngram_propose(self._history, b.text.block_table, b.lens, *limits, b.draft_token_ids)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        tokens = rows.token_ids[: rows.metadata.slot_mapping.shape[0]]
        ops.keep_tokens(tokens, rows.metadata.slot_mapping, self._history)

    @property
    def _history(self) -> Tensor:
        """The token of each slot, int32 [num_blocks, block_size]."""
        return self.stack.caches[0].key.flatten(1)


class NgramKind(Kind[NgramHead]):
    """See `NgramHead`."""

    protocol = NgramHead
    chains = NgramProgram
    position_offset = 1
    has_probs = False

    def no_trees(self, head: NgramHead) -> str:
        return "n-grams are drafted as chains: leave out the draft tree"

    def check(self, check: HeadCheck) -> None:
        """Check nothing: the head has no method that computes."""

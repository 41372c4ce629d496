"""The programs that draft all K tokens with one pass: masked (P-EAGLE), parallel (DFlash), block (DSpark), n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.context_parallel import rows_of_rank
from specgraph.attention.rows import block_rows, masked_rows, text_rows
from specgraph.capture import BatchDescriptor, MakeAttend, StepKind
from specgraph.config import DraftTree
from specgraph.draft.buffers import DraftBuffers, PassRows, PromptRows
from specgraph.draft.ngram_head import NgramHead
from specgraph.draft.program import DraftProgram, draw, draw_from_logits, draws_of, make_seeds, present
from specgraph.draft.protocol import BlockHead, MaskedHead, ModelHead, ParallelHead
from specgraph.ops.begin_rows import RowPlan


class MaskedProgram(DraftProgram[MaskedHead]):
    """A causal pass over query_len + K - 1 rows per request: those of the target's round, then K - 1 masked ones.

    The masked rows follow the last accepted one, so their keys lie in slots that the next round's rows overwrite.
    """

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return K - 1 rows more than the round has."""
        length = query_len + max(1, num_speculative_tokens) - 1
        later, filler = length - query_len, self.head.mask_token_id
        plan = RowPlan(length, *self.config.limits, later_rows=later, filler=filler)
        return PassRows(plan, query_len, later=length, carried=length)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        drafts = b.draft_token_ids.numel() if self.tree is None else b.last_rows.numel() * self.tree.num_steps
        hidden_rows, draft_rows = (b.draft_token_ids.new_empty(n) for n in (b.step_token_ids.numel(), drafts))
        masked_rows(b.plan, b.accepted, b.step.places, b.step_token_ids, hidden_rows, draft_rows)
        make_seeds(b)
        combined = torch.cat([self.head.combine(b.inputs.aux_hidden), self.head.mask_hidden[None]])
        ops.take_rows(combined, hidden_rows, b.hidden)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, 0), draft_rows)
        draft_block(self.head, b, out.hidden, self.tree)


ParallelT = TypeVar("ParallelT", bound=ParallelHead, covariant=True)


class ParallelProgram(DraftProgram[ParallelT]):
    """The round's hidden states become context keys and values, then a block of masked rows runs, not causal.

    Every request has as many rows in the block, 1 + K or K, padding included, so the rows of a captured size are a
    multiple of them.
    """

    @property
    def prefill_passes(self) -> int:
        """0: a prompt's context is stored without attention."""
        return 0

    @property
    def has_row_of_last_draft(self) -> bool:
        return not self.head.sample_from_anchor

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the round's rows as context, and a block of 1 + K, or of K where the anchor's row predicts too."""
        block = max(1, num_speculative_tokens + self.has_row_of_last_draft)
        filler = self.head.mask_token_id
        plan = RowPlan(block, *self.config.limits, after_sampled=True, later_rows=block, filler=filler)
        return PassRows(plan, query_len, later=block, carried=0)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        context = b.first.positions, b.first.slot_mapping
        block_rows(b.plan, b.accepted, b.step.places, b.step_token_ids, context)
        make_seeds(b)
        self.head.store_context(self.head.combine(b.inputs.aux_hidden), self.stack.store(b.first))
        token_ids = b.step_token_ids.view(b.inputs.num_sampled.shape[0], -1)
        hidden = self.head.forward(token_ids, make_attend(b.step, 0))
        blocks = hidden.view(*token_ids.shape, hidden.shape[-1])
        self._draft(b, blocks, blocks if self.head.sample_from_anchor else blocks[:, 1:])

    def _draft(self, b: DraftBuffers, blocks: Tensor, hidden: Tensor) -> None:
        """Draft from the rows of blocks [R, n, hidden_size], or those that predict, `hidden` [R, K, hidden_size]."""
        draft_block(self.head, b, hidden.flatten(0, 1), self.tree)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        """See `DraftProgram.prefill`. Context is made from hidden states alone: tokens are not read.

        No row depends on another, so of ranks that share keys each makes the rows of its own ones.
        """
        hidden, metadata = rows.aux_hidden, rows.metadata
        one_prompt = rows.last_row is not None and metadata.seq_lens.shape[0] == 1  # whose positions follow each other
        ranks = self.stack.layers[0].ranks if one_prompt else None
        if (own := rows_of_rank(metadata.positions, ranks)) is not None:
            places = {name: getattr(metadata, name)[own] for name in ("positions", "slot_mapping")}
            hidden, metadata = hidden[own], replace(metadata, **places)
        self.head.store_context(self.head.combine(hidden), self.stack.store(metadata))


class BlockProgram(ParallelProgram[BlockHead]):
    """The pass of a `ParallelProgram`, then K draws, each of which knows the tokens before it."""

    def _draft(self, b: DraftBuffers, blocks: Tensor, hidden: Tensor) -> None:
        """Draw K tokens per request in order, and say how likely each is accepted."""
        head, (requests, k) = self.head, b.draft_token_ids.shape
        following, token_ids = head.in_order(blocks), b.step_token_ids.view(requests, -1)[:, 0]
        before, columns = [token_ids], torch.arange(k, dtype=torch.int32, device=hidden.device)
        draws = draws_of(b, (b.inputs.start_positions, None))
        later = None if draws is None else b.inputs.num_sampled + columns[:, None]
        for row in range(k):
            column, logits = slice(row, row + 1), following(row, before[row])
            drafts = ops.Drafts(b.draft_token_ids[:, column], head.draft_to_target)
            if draws is not None:
                probs = present(b.draft_probs)[:, column]
                draws = draws._replace(more_positions=present(later)[row], draft_probs=probs)
            if b.sampling is None and logits.lm_head is not None:
                ops.draft_from_hidden(present(logits.x), logits.lm_head._replace(turn=row), drafts, draws)
            else:
                drafted = None if b.sampling is None else torch.where(columns < row, b.draft_token_ids, -1)
                draw_from_logits(head, b, logits.tensor(), drafts, draws, drafted)
            before.append(b.draft_token_ids[:, row])
        if b.confidence is not None:
            b.confidence.copy_(head.confidence(hidden, torch.stack(before[:-1], dim=1)))


class NgramProgram(DraftProgram[NgramHead]):
    """The sampled tokens enter each request's text, then the text is looked through. No row attends.

    The cache has each token at its own position, one further than the row that takes it.
    """

    step_kind: StepKind = "together"

    @property
    def prefill_passes(self) -> int:
        """0: a prompt's tokens are stored without attention."""
        return 0

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the round's rows; rejected ones have no slot, so that their tokens are in no text."""
        plan = RowPlan(query_len, *self.config.limits, position_offset=self.position_offset)
        return PassRows(plan, query_len, later=1, carried=0)

    def num_steps(self, batch: BatchDescriptor) -> int:
        return 0

    def run(self, b: DraftBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        self.first(b, make_attend)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> None:
        text_rows(b.plan, b.accepted, b.first.places, b.token_ids, b.step.seq_lens)
        ops.keep_tokens(b.token_ids, b.first.slot_mapping, self._history)
        limits = self.head.prompt_lookup_min, self.head.prompt_lookup_max, self.config.max_model_len
        ops.ngram_propose(self._history, b.step.block_table, b.step.seq_lens, *limits, b.draft_token_ids)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        tokens = rows.token_ids[: rows.metadata.slot_mapping.shape[0]]
        ops.keep_tokens(tokens, rows.metadata.slot_mapping, self._history)

    @property
    def _history(self) -> Tensor:
        """The token of each slot, int32 [num_blocks, block_size]."""
        return self.stack.caches[0].key.flatten(1)


def draft_block(head: ModelHead, b: DraftBuffers, hidden: Tensor, tree: DraftTree | None) -> None:
    """Draw all K tokens per request, or the tree of K steps, from hidden states [R * K, hidden_size]. No row knows the
    tokens of those before it."""
    if tree is not None:
        nodes = ops.TreeNodes(b.draft_token_ids, present(b.draft_parents))
        ops.draft_block_tree(head.logits(hidden), head.draft_to_target, tree.top_k, nodes)
        return
    drafts = ops.Drafts(b.draft_token_ids, head.draft_to_target)
    draw(head, b, hidden, drafts, (b.inputs.start_positions, b.inputs.num_sampled))

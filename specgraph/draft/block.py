"""The block program: one pass over a block, then K draws in order (DSpark, Domino)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specgraph import ops
from specgraph.draft.buffers import Allocation
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.parallel import ParallelBuffers, ParallelKind, ParallelProgram
from specgraph.draft.program import draw_from_logits, draws_of, present
from specgraph.draft.protocol import BlockHead


class BlockProgram(ParallelProgram[BlockHead]):
    """The pass of a `ParallelProgram`, then K draws. Each draw knows the tokens before it."""

    def allocate(self, new: Allocation) -> ParallelBuffers:
        shape = new.requests, new.config.num_speculative_tokens
        confidence = new.zeros(*shape, dtype=torch.float32) if self.head.has_confidence else None
        return replace(super().allocate(new), confidence=confidence)

    def _draft(self, b: ParallelBuffers, blocks: Tensor, hidden: Tensor) -> None:
        """Draw K tokens per request in order, and estimate how likely each is accepted."""
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
            before.append(b.draft_token_ids[:, row])  # the draw writes it
            if b.sampling is None and draws is None and logits.draw(drafts):
                continue
            if b.sampling is None and logits.lm_head is not None:
                ops.draft_from_hidden(present(logits.x), logits.lm_head._replace(turn=row), drafts, draws)
            else:
                drafted = None if b.sampling is None else torch.where(columns < row, b.draft_token_ids, -1)
                draw_from_logits(head, b, logits.tensor(), drafts, draws, drafted)
        if b.confidence is not None:
            b.confidence.copy_(head.confidence(hidden, torch.stack(before[:-1], dim=1)))


class BlockKind(ParallelKind):
    """See `BlockHead`."""

    protocol = BlockHead
    chains = BlockProgram
    trees = None

    def check_draws(self, check: HeadCheck, hidden: Tensor, ids: Tensor) -> None:
        logits = check.call("in_order", hidden[None])(0, ids[:1]).tensor()
        check.expect("in_order(hidden)(0, token_ids)", logits, 1, check.head.draft_vocab_size)
        if check.head.has_confidence:
            chances = check.call("confidence", hidden[None], ids[None])
            check.expect("confidence(hidden, token_ids)", chances, 1, check.rows, dtype=torch.float32)

"""Broken n-gram drafts: of another text than the request's own."""

from __future__ import annotations

from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor


@mutant("ngram-history", "specgraph.ops:ngram_propose")
def rejected_draft_stays(real: Any, history: Tensor, table: Tensor, seq_lens: Tensor, *rest: Any) -> None:
    """A text is not rolled back: the token behind those that the target accepted stays its last one."""
    real(history, table, seq_lens + (seq_lens > 0).int(), *rest)


@mutant("ngram-history-of-prompts", "specgraph.draft.ngram:NgramProgram.first")
def prompts_alone(real: Any, self: Any, b: Any, make_attend: Any) -> None:
    """Sampled tokens never enter a text, which holds the prompt and whatever was behind it."""
    before = self.stack.caches[0].key.clone()
    real(self, b, make_attend)
    self.stack.caches[0].key.copy_(before)


@mutant("ngram-match", "specgraph.ops:ngram_propose")
def match_across_requests(
    real: Any, history: Tensor, table: Tensor, seq_lens: Tensor, shortest: int, longest: int, limit: int, drafts: Tensor
) -> None:
    """N-grams are also found behind a request's end: in the blocks of the request before, as if they were one text."""
    behind = table.shape[1] * history.shape[1]
    both = torch.where(seq_lens > 0, seq_lens.clamp(max=limit) + behind, 0).int()
    real(history, torch.cat([table.roll(1, 0), table], dim=1), both, shortest, longest, behind + limit, drafts)


@mutant("ngram-match-past-the-end", "specgraph.ops:ngram_propose")
def past_the_text(real: Any, history: Tensor, table: Tensor, seq_lens: Tensor, *rest: Any) -> None:
    """N-grams are looked for up to the end of the blocks, where tokens of an earlier request are left."""
    shortest, longest, limit, drafts = rest
    width = torch.full_like(seq_lens, min(limit, table.shape[1] * history.shape[1]))
    real(history, table, torch.where(seq_lens > 0, width, 0).int(), shortest, longest, limit, drafts)

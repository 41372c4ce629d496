"""Accepting drafts by the distribution that `generate` would draw from, or by its most likely token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper

from specgraph import DraftTokens, ProposeBatch, kernels
from specgraph.kernels.sampling_parameters import EXCLUDED


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How the tokens of one `generate` are chosen."""

    processors: Sequence[Any]
    """Logits processors of `supported.PROCESSORS`, in order."""
    sampled: bool
    """`do_sample`."""

    @property
    def temperature(self) -> float:
        """What drafts are drawn by; 0 for greedy."""
        if not self.sampled:
            return 0.0
        return next((p.temperature for p in self.processors if type(p) is TemperatureLogitsWarper), 1.0)

    def first_tokens(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """int64 [n]: the tokens after the prompts, from logits [n, vocab], as `generate` chooses them."""
        scores = self._scores(logits, input_ids)
        if not self.sampled:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)[:, 0]

    def verify(
        self, logits: Tensor, input_ids: Tensor, drafts: DraftTokens, into: ProposeBatch, vocab_map: Tensor | None
    ) -> None:
        """Write the accepted drafts and the target's own token after them, and their count, into the next round.

        Args:
            logits: [n, K + 1, vocab].
            input_ids: int64 [n, P]: for processors that want them; none of those supported reads them.
            drafts: K tokens per request, with their distributions if they were drawn.
            into: `sampled_token_ids` and `num_sampled` are written; `start_positions` are read, negative ones mark
                inert requests; `seeds` are read where tokens are drawn.
            vocab_map: the drafter's `draft_to_target`.
        """
        device = into.start_positions.device
        scores = self._scores(logits.flatten(0, 1), input_ids).to(device)
        ids, starts = drafts.token_ids, into.start_positions
        tokens, counts = into.sampled_token_ids, into.num_sampled
        if not self.sampled:
            kernels.verify_greedy.on(device)(scores, ids, starts, tokens, counts)
            return
        assert into.seeds is not None
        temperature = torch.ones_like(starts, dtype=torch.float32)  # the scores are divided by it already
        scores = scores.clamp(min=EXCLUDED)
        kernels.verify_sampled.on(device)(
            scores, ids, drafts.probs, vocab_map, temperature, into.seeds, starts, tokens, counts
        )

    def _scores(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """[rows, vocab] float32 after all processors."""
        scores = logits.float()
        for processor in self.processors:
            scores = processor(input_ids, scores)
        return scores

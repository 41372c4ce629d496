"""Accepts drafts by the distribution that `generate` would draw from, or by its most likely token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.ops.sampling_parameters import EXCLUDED
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper

from specgraph import DraftTokens, ProposeBatch
from specgraph_transformers.supported import PREFIX_PROCESSORS


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chooses the tokens of one `generate`."""

    processors: Sequence[Any]
    """The logits processors of `generate`, in order. `check_supported` has checked them."""
    sampled: bool
    """`do_sample` of `generate`."""
    num_requests: int

    @property
    def temperature(self) -> float:
        """The temperature of drafts. 0 is greedy."""
        if not self.sampled:
            return 0.0
        return next((p.temperature for p in self.processors if type(p) is TemperatureLogitsWarper), 1.0)

    def first_tokens(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Return the token after each prompt, int64 [n], from logits [n, vocab], as `generate` chooses it."""
        scores = self._scores(logits, list(input_ids[:, None]))
        if not self.sampled:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)[:, 0]

    @property
    def reads_prefixes(self) -> bool:
        """True if `verify` needs the tokens before each row."""
        return any(type(processor) in PREFIX_PROCESSORS for processor in self.processors)

    def verify(
        self,
        logits: Tensor,
        prefixes: Sequence[Tensor],
        drafts: DraftTokens,
        into: ProposeBatch,
        vocab_map: Tensor | None,
    ) -> None:
        """Write accepted drafts, the target's own token after them, and their count into the next propose's batch.

        Args:
            logits: [n, K + 1, vocab].
            prefixes: int64 [1, tokens] for each row of each request: the padded prompt and the tokens up to the row's
                own. Read only if `reads_prefixes`.
            drafts: K tokens per request, with their distributions if they are sampled.
            into: its `sampled_token_ids` and `num_sampled` are written. Its `start_positions` are read; a negative one
                marks an inert request. Its `seeds` are read if tokens are sampled.
            vocab_map: the drafter's `draft_to_target`.
        """
        device = into.start_positions.device
        scores = self._scores(logits.flatten(0, 1), prefixes).to(device)
        ids, starts = drafts.token_ids, into.start_positions
        acceptance = decoder_ops.Acceptance()
        if self.sampled:
            temperature = torch.ones_like(starts, dtype=torch.float32)  # a processor has divided the scores already
            acceptance = decoder_ops.Acceptance(temperature, into.seeds, drafts.probs, vocab_map)
            scores = scores.clamp(min=EXCLUDED)
        sampled = decoder_ops.Sampled(into.sampled_token_ids, into.num_sampled)
        decoder_ops.verify_drafts.on(device)(scores, ids, starts, acceptance, sampled)

    def _scores(self, logits: Tensor, prefixes: Sequence[Tensor]) -> Tensor:
        """Return the logits after all processors, float32 [rows, vocab]."""
        scores = logits.float()
        for processor in self.processors:
            if type(processor) in PREFIX_PROCESSORS:
                per_request = len(prefixes) // self.num_requests
                own = [_for_request(processor, row // per_request) for row in range(len(prefixes))]
                rows = zip(own, prefixes, scores, strict=True)
                scores = torch.cat([process(prefix, row[None]) for process, prefix, row in rows])
            else:
                scores = processor(None, scores)
        return scores


def _for_request(processor: Any, request: int) -> Any:
    """Return the processor for one request: a repetition penalty holds each prompt's padding, for the whole batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    single = copy(processor)
    single.prompt_ignore_length = ignored[request : request + 1]
    return single

"""Broken models and hand-overs that leave greedy output as it is: only KV, drafts and metrics show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mutants.registry import mutant
from specgraph_models.mtp import MtpHead
from specgraph_run.decoder.metrics import AcceptanceMetrics
from torch import Tensor

from specgraph.draft import Drafter
from specgraph.ops.linear import Weight


@mutant("bad-first-drafts", "specgraph_run.decoder.joining:prefill_prompt")
def another_prompt_row(real: Any, *args: Any) -> range:
    """The propose after a prompt takes the hidden state of the row before the prompt's last one."""
    starts = real(*args)
    return range(starts.start + 1, starts.stop + 1, starts.step)


@mutant("prompt-keys-chunks", "specgraph.draft.drafter:Drafter.prefill")
def later_chunks_shifted(
    real: Any, self: Drafter, prompt: Sequence[int], positions: range, *rest: Any, **options: Any
) -> Tensor | None:
    """The drafter's prompt chunks after the first take their tokens one place too early."""
    shifted = [prompt[0], *prompt[:-1]] if positions.start else prompt
    return real(self, shifted, positions, *rest, **options)


@mutant("prompt-keys", "specgraph_models.decoder:rotary_table")
def rotary_in_half_precision(real: Any, *args: Any) -> Any:
    """The rotary table is computed in bfloat16."""
    return real(*args).bfloat16().float()


@mutant("prompt-keys-frequencies", "specgraph_models.decoder:rotary_table")
def rotary_frequencies(real: Any, config: Any, positions: int, dim: int, device: torch.device) -> Tensor:
    """Rotary frequencies fall with i / dim instead of 2 i / dim."""
    return real(type(config)(theta=config.theta**0.5), positions, dim, device)


@mutant("head-arithmetic", "specgraph_models.decoder:DecoderModel.__init__")
def parallel_head_is_causal(real: Any, *args: Any, **options: Any) -> None:
    """The block of a parallel drafter attends causally."""
    real(*args, **{**options, "causal": True})


@mutant("head-arithmetic-modules", "specgraph_models.mtp:MtpHead._module")
def modules_reversed(real: Any, self: MtpHead, step: int, *rest: Any) -> Any:
    """A drafter with one module per step runs them from the last to the first."""
    return real(self, self.num_modules - 1 - step, *rest)


@mutant("draft-vocabulary-map", "specgraph_models.decoder:cut_offsets")
def own_map_forgotten(real: Any, draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """A drafter that is cut to a list of tokens forgets the map of its own vocabulary."""
    return real(draft_ids, None)


@mutant("draft-vocabulary-map-rows", "specgraph.ops.linear:Weight.rows")
def first_rows_kept(real: Any, self: Weight, kept: slice | Tensor) -> Weight:
    """A drafter that is cut to a list of tokens keeps the first rows of its correction, not those of the list."""
    return real(self, kept if isinstance(kept, slice) else torch.arange(len(kept)))


@mutant("metrics-count-the-bonus", "specgraph_run.decoder.metrics:AcceptanceMetrics.observe")
def bonus_counted(real: Any, self: AcceptanceMetrics, accepted: Sequence[int], num_speculative_tokens: int) -> None:
    """The target's own token counts as an accepted draft token."""
    real(self, [min(count + 1, num_speculative_tokens) for count in accepted], num_speculative_tokens)

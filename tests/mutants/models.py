"""Broken models and hand-overs that leave greedy output as it is: only KV, drafts and metrics show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor

import specgraph.models.decoder
from specgraph.draft import Drafter
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.models.decoder import DecoderModel
from specgraph.models.mtp import MtpHead


@mutant("bad-first-drafts", "engine")
def another_prompt_row(patch: pytest.MonkeyPatch) -> None:
    """The propose after a prompt takes the hidden state of the row before the prompt's last one."""
    real = Drafter.prefill

    def prefill(self: Drafter, prompt: Sequence[int], positions: range, *rest: Any) -> Tensor | None:
        hidden = real(self, prompt, positions, *rest)
        return None if hidden is None else self.prefill_buffers.aux_hidden[max(0, len(positions) - 2)]

    patch.setattr(Drafter, "prefill", prefill)


@mutant("bad-first-drafts-chunks", "engine", hazard="prompt-keys")
def later_chunks_shifted(patch: pytest.MonkeyPatch) -> None:
    """The drafter's prompt chunks after the first take their tokens one place too early."""
    real = Drafter.prefill

    def prefill(self: Drafter, prompt: Sequence[int], positions: range, *rest: Any) -> Tensor | None:
        shifted = [prompt[0], *prompt[:-1]] if positions.start else prompt
        return real(self, shifted, positions, *rest)

    patch.setattr(Drafter, "prefill", prefill)


@mutant("prompt-keys", "model")
def rotary_in_half_precision(patch: pytest.MonkeyPatch) -> None:
    """The rotary table is computed in bfloat16."""
    real = specgraph.models.decoder.rotary_table
    patch.setattr(specgraph.models.decoder, "rotary_table", lambda *args: real(*args).bfloat16().float())


@mutant("prompt-keys-frequencies", "model", hazard="prompt-keys")
def rotary_frequencies(patch: pytest.MonkeyPatch) -> None:
    """Rotary frequencies fall with i / dim instead of 2 i / dim."""
    real = specgraph.models.decoder.rotary_table

    def table(config: Any, positions: int, dim: int, device: torch.device) -> Tensor:
        return real(type(config)(theta=config.theta**0.5), positions, dim, device)

    patch.setattr(specgraph.models.decoder, "rotary_table", table)


@mutant("head-arithmetic", "model")
def parallel_head_is_causal(patch: pytest.MonkeyPatch) -> None:
    """The block of a parallel drafter attends causally."""
    real = DecoderModel.__init__
    patch.setattr(DecoderModel, "__init__", lambda *args, **options: real(*args, **{**options, "causal": True}))


@mutant("head-arithmetic-modules", "model", hazard="head-arithmetic")
def modules_reversed(patch: pytest.MonkeyPatch) -> None:
    """A drafter with one module per step runs them from the last to the first."""
    real = MtpHead._module

    def module(self: MtpHead, step: int, *rest: Any) -> Any:
        return real(self, self.num_modules - 1 - step, *rest)

    patch.setattr(MtpHead, "_module", module)


@mutant("metrics-count-the-bonus", "engine")
def bonus_counted(patch: pytest.MonkeyPatch) -> None:
    """The target's own token counts as an accepted draft token."""
    real = AcceptanceMetrics.observe

    def observe(self: AcceptanceMetrics, accepted: Sequence[int], num_speculative_tokens: int) -> None:
        real(self, [min(count + 1, num_speculative_tokens) for count in accepted], num_speculative_tokens)

    patch.setattr(AcceptanceMetrics, "observe", observe)

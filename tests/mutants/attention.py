"""Broken attention and draft kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor

from specgraph import kernels
from specgraph.graphs import AttentionStack

ATTENTION_OPS = ("paged_attention", "rotate_store_attend")


@mutant("metadata-none-at-capture", "attention")
def metadata_none_at_capture(patch: pytest.MonkeyPatch) -> None:
    """Captured without metadata, attention returns at once with nothing in its output."""

    def captured(self: AttentionStack, recording: Any) -> Any:
        return lambda metadata, step: lambda index, query, key, value: torch.zeros_like(query)

    patch.setattr(AttentionStack, "captured", captured)


@mutant("acceptance-hidden", "attention")
def acceptance_hidden(patch: pytest.MonkeyPatch) -> None:
    """Captured attention differs from eager attention in the last bits: the graph works, and nobody compares."""
    real = AttentionStack.captured

    def captured(self: AttentionStack, recording: Any) -> Any:
        make = real(self, recording)

        def make_attend(metadata: Any, step: int) -> Any:
            attend = make(metadata, step)
            return lambda *args: attend(*args) * (1 + 2**-18)

        return make_attend

    patch.setattr(AttentionStack, "captured", captured)


@mutant("metadata-not-rebuilt-between-steps", "attention")
def metadata_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """Between draft steps lengths and slots move on, positions don't."""
    real = kernels.advance

    def advance(seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
        before = positions.clone()
        real(seq_lens, positions, *rest)
        positions.copy_(before)

    patch.setattr(kernels, "advance", advance)


@mutant("chain-without-slots", "attention")
def chain_without_slots(patch: pytest.MonkeyPatch) -> None:
    """The later draft steps have no slot mapping."""
    real = kernels.advance

    def advance(seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
        real(seq_lens, positions, slot_mapping, *rest)
        slot_mapping.fill_(-1)

    patch.setattr(kernels, "advance", advance)


@mutant("max-len-clamp", "attention")
def max_len_clamp(patch: pytest.MonkeyPatch) -> None:
    """Later draft steps move positions past max_model_len."""
    real = kernels.advance

    def advance(seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
        real(seq_lens, positions, *rest)
        positions.copy_((seq_lens.long() - 1).clamp(min=0))

    patch.setattr(kernels, "advance", advance)


@mutant("padded-rows-write-kv", "attention")
def padded_rows_write_kv(patch: pytest.MonkeyPatch) -> None:
    """Padded rows have the slot of a real block instead of -1."""
    real = kernels.begin_propose

    def begin_propose(*args: Any, slot_mapping: Tensor, **options: Any) -> None:
        real(*args, slot_mapping=slot_mapping, **options)
        first = options["block_size"]
        slot_mapping.copy_(torch.where(slot_mapping < 0, first, slot_mapping))

    patch.setattr(kernels, "begin_propose", begin_propose)


@mutant("query-len-zero", "attention")
def query_len_zero(patch: pytest.MonkeyPatch) -> None:
    """A request without rows is skipped when rows are numbered, so that later requests take their neighbour's rows."""

    def ragged(real: Any) -> Any:
        def attention(*args: Any, **options: Any) -> Tensor:
            changed = [_dense_starts(a) if _is_start_loc(a) else a for a in args]
            return real(*changed, **options)

        return attention

    for name in ATTENTION_OPS:
        patch.setattr(kernels, name, ragged(getattr(kernels, name)))


def _is_start_loc(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int32 and value.dim() == 1 and value[0] == 0


def _dense_starts(starts: Tensor) -> Tensor:
    """Every request has at least one row."""
    counts = starts.diff().clamp(min=1)
    return torch.cat([starts[:1], counts.cumsum(0).clamp(max=int(starts[-1])).int()])


@mutant("draft-step-column", "attention")
def draft_step_column(patch: pytest.MonkeyPatch) -> None:
    """The draft token goes into a column of a copy: indexing with a tensor is no view."""
    for name in ("draft_greedy", "draft_gumbel", "greedy_head"):
        real = getattr(kernels, name)

        def write_into_copy(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            place = len(args) - (2 if _name == "draft_gumbel" else 1)
            return _real(*args[:place], args[place].clone(), *args[place + 1 :], **options)

        patch.setattr(kernels, name, write_into_copy)


@mutant("gumbel-seed-position", "attention")
def gumbel_seed_position(patch: pytest.MonkeyPatch) -> None:
    """The noise of a draft depends on the seed alone and forgets the position."""
    real = kernels.draft_gumbel

    def draft_gumbel(logits: Any, vocab_map: Any, temperature: Any, seeds: Any, seq_lens: Tensor, *rest: Any) -> None:
        real(logits, vocab_map, temperature, seeds, torch.zeros_like(seq_lens), *rest)

    patch.setattr(kernels, "draft_gumbel", draft_gumbel)

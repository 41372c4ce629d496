"""Broken attention and draft kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from mutants.draft_ops import change_arguments, change_draws, replace_op
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.capture import AttentionStack
from specgraph.ops import DeviceLengths, KVCache, NewRows
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows


@mutant("metadata-none-at-capture", "attention")
def metadata_none_at_capture(patch: pytest.MonkeyPatch) -> None:
    """Captured without metadata, attention returns at once with nothing in its output."""

    _change_captured(patch, lambda attend: lambda index, query, key, value: torch.zeros_like(query))


@mutant("acceptance-hidden", "attention")
def acceptance_hidden(patch: pytest.MonkeyPatch) -> None:
    """Captured attention differs from eager attention in the last bits: the graph works, and nobody compares."""
    _change_captured(patch, lambda attend: lambda *args: attend(*args) * (1 + 2**-18))


def _change_captured(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change attention that is captured whole, and none that runs eagerly."""
    real = AttentionStack.attend_in

    def attend_in(self: AttentionStack, recording: Any, mode: Any, *lengths: Any) -> Any:
        make = real(self, recording, mode, *lengths)
        if recording is None or mode == "piecewise":
            return make
        return lambda metadata, step: change(make(metadata, step))

    patch.setattr(AttentionStack, "attend_in", attend_in)


@mutant("metadata-not-rebuilt-between-steps", "attention")
def metadata_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """Between draft steps lengths and slots move on, positions don't."""
    real = ops.advance

    def advance(seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
        before = positions.clone()
        real(seq_lens, positions, *rest)
        positions.copy_(before)

    patch.setattr(ops, "advance", advance)


@mutant("chain-without-slots", "attention")
def chain_without_slots(patch: pytest.MonkeyPatch) -> None:
    """The later draft steps have no slot mapping."""
    real = ops.advance

    def advance(seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
        real(seq_lens, positions, slot_mapping, *rest)
        slot_mapping.fill_(-1)

    patch.setattr(ops, "advance", advance)


@mutant("max-len-clamp", "attention")
def max_len_clamp(patch: pytest.MonkeyPatch) -> None:
    """Later draft steps move positions past max_model_len."""
    real = ops.advance

    def advance(seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
        real(seq_lens, positions, *rest)
        positions.copy_((seq_lens.long() - 1).clamp(min=0))

    patch.setattr(ops, "advance", advance)


@mutant("padded-rows-write-kv", "attention")
def padded_rows_write_kv(patch: pytest.MonkeyPatch) -> None:
    """Padded rows have the slot of a real block instead of -1."""
    real = ops.begin_rows

    def begin_rows(given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        real(given, plan, rows, *past)
        if plan.slots_of_rejected:  # of a propose
            rows.slot_mapping.copy_(torch.where(rows.slot_mapping < 0, plan.block_size, rows.slot_mapping))

    patch.setattr(ops, "begin_rows", begin_rows)


@mutant("query-len-zero", "attention")
def query_len_zero(patch: pytest.MonkeyPatch) -> None:
    """A request without rows is skipped when rows are numbered, so that later requests take their neighbour's rows."""

    def change(query: Tensor, cache: Any, table: Tensor, lengths: DeviceLengths, *rest: Any) -> tuple[Any, ...]:
        starts = lengths.query_start_loc
        counts = starts.diff().clamp(min=1)
        dense = torch.cat([starts[:1], counts.cumsum(0).clamp(max=int(starts[-1])).int()])
        return query, cache, table, lengths._replace(query_start_loc=dense), *rest

    change_arguments(patch, "paged_attention", change)


@mutant("draft-step-column", "attention")
def draft_step_column(patch: pytest.MonkeyPatch) -> None:
    """The draft token goes into a column of a copy: indexing with a tensor is no view."""

    def broken(*args: Any) -> tuple[Any, ...]:
        *given, drafts, draws = args
        return *given, drafts._replace(draft_token_ids=drafts.draft_token_ids.clone()), draws

    change_draws(patch, broken)


@mutant("gumbel-seed-position", "attention")
def gumbel_seed_position(patch: pytest.MonkeyPatch) -> None:
    """The noise of a draft depends on the seed alone and forgets the position."""

    def same_position(*args: Any) -> tuple[Any, ...]:
        *given, draws = args
        return *given, None if draws is None else draws._replace(positions=torch.zeros_like(draws.positions))

    change_draws(patch, same_position)


def _with_tables(patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Device-length attention reads `change(block_table, seq_lens, key_cache)` instead of its table and lengths."""

    def changed(query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, *rest: Any) -> tuple[Any, ...]:
        table, seq_lens = change(table, lengths.seq_lens, cache.key)
        return query, cache, table, lengths._replace(seq_lens=seq_lens), *rest

    change_arguments(patch, "paged_attention", changed)


@mutant("attention-many-requests", "attention")
def eighth_request(patch: pytest.MonkeyPatch) -> None:
    """Requests from the eighth on read the blocks of the request before them."""

    def change(table: Tensor, seq_lens: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([table[:7], table[6:-1]]) if table.shape[0] > 7 else table, seq_lens

    _with_tables(patch, change)


@mutant("attention-many-requests-lengths", "attention", hazard="attention-many-requests")
def length_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """In batches of more than 32 requests, request 32 has the length of request 0."""

    def change(table: Tensor, seq_lens: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        changed = seq_lens.clone()
        changed[32:33] = seq_lens[0]
        return table, changed

    _with_tables(patch, change)


@mutant("attention-many-keys", "attention")
def last_1024_keys(patch: pytest.MonkeyPatch) -> None:
    """Attention sees only the last 1,024 keys or so of a request."""

    def change(table: Tensor, seq_lens: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        size = cache.shape[1]
        skipped = ((seq_lens - 1024).clamp(min=0) // size).long()
        columns = (torch.arange(table.shape[1], device=table.device) + skipped[:, None]).clamp(max=table.shape[1] - 1)
        return table.gather(1, columns), (seq_lens - skipped * size).int()

    _with_tables(patch, change)


@mutant("attention-many-keys-sixteen-bits", "attention", hazard="attention-many-keys")
def keys_in_sixteen_bits(patch: pytest.MonkeyPatch) -> None:
    """Keys from 32,768 on are left out: their number is kept in a signed 16-bit integer."""
    _with_tables(patch, lambda table, seq_lens, cache: (table, seq_lens.clamp(max=2**15 - 1)))


@mutant("attention-rounded-scores", "attention")
def rounded_scores(patch: pytest.MonkeyPatch) -> None:
    """Scores of half-precision attention are rounded to the query's dtype before the softmax."""

    def broken(
        real: Any, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, mask: Any, new: NewRows | None,
        *, scale: float,
    ) -> Tensor:  # fmt: skip
        plain = real(query, cache, table, lengths, mask, new, scale=scale)
        if query.dtype == torch.float32 or new is None or new.rotary is not None:
            return plain
        for r, (first, last) in enumerate(pairwise(lengths.query_start_loc.tolist())):
            n, rows = int(lengths.seq_lens[r]), query[first:last]
            groups = query.shape[1] // cache.key.shape[2]
            keys, values = (part[table[r].long()].flatten(0, 1)[:n].repeat_interleave(groups, dim=1) for part in cache)
            for i in range(last - first):
                seen = n - (last - first) + 1 + i
                scores = torch.einsum("hd,nhd->hn", rows[i].float(), keys[:seen].float()) * scale
                weights = scores.to(query.dtype).float().softmax(-1)
                plain[first + i] = torch.einsum("hn,nhd->hd", weights, values[:seen].float()).to(query.dtype)
        return plain

    replace_op(patch, "paged_attention", broken)

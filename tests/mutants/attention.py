"""Broken attention and draft kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.ops import DeviceLengths, KVCache, NewRows
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows


@mutant("metadata-none-at-capture", "specgraph.capture:AttentionStack.attend_in")
def metadata_none_at_capture(real: Any, self: Any, recording: Any, mode: Any, *lengths: Any) -> Any:
    """Captured without metadata, attention returns at once with nothing in its output."""
    make = real(self, recording, mode, *lengths)
    if recording is None or mode == "piecewise":
        return make
    return lambda metadata, step: lambda index, query, key, value: torch.zeros_like(query)


@mutant("acceptance-hidden", "specgraph.capture:AttentionStack.attend_in")
def acceptance_hidden(real: Any, self: Any, recording: Any, mode: Any, *lengths: Any) -> Any:
    """Captured attention differs from eager attention in the last bits: the graph works, and nobody compares."""
    make = real(self, recording, mode, *lengths)
    if recording is None or mode == "piecewise":
        return make

    def make_attend(metadata: Any, step: int) -> Any:
        attend = make(metadata, step)
        return lambda *args: attend(*args) * (1 + 2**-18)

    return make_attend


@mutant("metadata-not-rebuilt-between-steps", "specgraph.ops:advance")
def metadata_not_rebuilt(real: Any, seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
    """Between draft steps lengths and slots move on, positions don't."""
    before = positions.clone()
    real(seq_lens, positions, *rest)
    positions.copy_(before)


@mutant("chain-without-slots", "specgraph.ops:advance")
def chain_without_slots(real: Any, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
    """The later draft steps have no slot mapping."""
    real(seq_lens, positions, slot_mapping, *rest)
    slot_mapping.fill_(-1)


@mutant("max-len-clamp", "specgraph.ops:advance")
def max_len_clamp(real: Any, seq_lens: Tensor, positions: Tensor, *rest: Any) -> None:
    """Later draft steps move positions past max_model_len."""
    real(seq_lens, positions, *rest)
    positions.copy_((seq_lens.long() - 1).clamp(min=0))


@mutant("padded-rows-write-kv", "specgraph.ops:begin_rows")
def padded_rows_write_kv(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """Padded rows have the slot of a real block instead of -1."""
    real(given, plan, rows, *past)
    if plan.slots_of_rejected:  # of a propose
        rows.slot_mapping.copy_(torch.where(rows.slot_mapping < 0, plan.block_size, rows.slot_mapping))


@mutant("query-len-zero", "specgraph.ops:paged_attention")
def query_len_zero(
    real: Any, query: Tensor, cache: Any, table: Tensor, lengths: DeviceLengths, *rest: Any, **options: Any
) -> Any:
    """A request without rows is skipped when rows are numbered, so that later requests take their neighbour's rows."""
    starts = lengths.query_start_loc
    counts = starts.diff().clamp(min=1)
    dense = torch.cat([starts[:1], counts.cumsum(0).clamp(max=int(starts[-1])).int()])
    return real(query, cache, table, lengths._replace(query_start_loc=dense), *rest, **options)


@mutant("draft-step-column", "specgraph.ops:draft_from_logits", "specgraph.ops:draft_from_hidden")
def draft_step_column(real: Any, *args: Any) -> Any:
    """The draft token goes into a column of a copy: indexing with a tensor is no view."""
    return real(
        *(a._replace(draft_token_ids=a.draft_token_ids.clone()) if isinstance(a, ops.Drafts) else a for a in args)
    )


@mutant("gumbel-seed-position", "specgraph.ops:draft_from_logits", "specgraph.ops:draft_from_hidden")
def gumbel_seed_position(real: Any, *args: Any) -> Any:
    """The noise of a draft depends on the seed alone and forgets the position."""
    return real(*(a._replace(positions=a.positions * 0) if isinstance(a, ops.Draws) else a for a in args))


@mutant("attention-many-requests", "specgraph.ops:paged_attention")
def eighth_request(real: Any, query: Tensor, cache: KVCache, table: Tensor, *rest: Any, **options: Any) -> Any:
    """Requests from the eighth on read the blocks of the request before them."""
    return real(query, cache, torch.cat([table[:7], table[6:-1]]) if len(table) > 7 else table, *rest, **options)


@mutant("attention-many-requests-lengths", "specgraph.ops:paged_attention")
def length_of_a_neighbour(
    real: Any, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, *rest: Any, **options: Any
) -> Any:
    """Request 32 has the length of request 0 in batches of more than 32."""
    changed = lengths.seq_lens.clone()
    changed[32:33] = changed[0]
    return real(query, cache, table, lengths._replace(seq_lens=changed), *rest, **options)


@mutant("attention-many-keys", "specgraph.ops:paged_attention")
def last_1024_keys(
    real: Any, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, *rest: Any, **options: Any
) -> Any:
    """Attention sees only the last 1,024 keys or so of a request."""
    skipped = ((lengths.seq_lens - 1024).clamp(min=0) // cache.block_size).long()
    columns = (torch.arange(table.shape[1], device=table.device) + skipped[:, None]).clamp(max=table.shape[1] - 1)
    seen = (lengths.seq_lens - skipped * cache.block_size).int()
    return real(query, cache, table.gather(1, columns), lengths._replace(seq_lens=seen), *rest, **options)


@mutant("attention-many-keys-sixteen-bits", "specgraph.ops:paged_attention")
def keys_in_sixteen_bits(
    real: Any, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, *rest: Any, **options: Any
) -> Any:
    """Keys from 32,768 on are left out: their number is kept in a signed 16-bit integer."""
    seen = lengths.seq_lens.clamp(max=2**15 - 1)
    return real(query, cache, table, lengths._replace(seq_lens=seen), *rest, **options)


@mutant("attention-rounded-scores", "specgraph.ops:paged_attention")
def rounded_scores(
    real: Any,
    query: Tensor,
    cache: KVCache,
    table: Tensor,
    lengths: DeviceLengths,
    mask: Any,
    new: NewRows | None,
    *,
    scale: float,
) -> Tensor:
    """Scores of half-precision attention are rounded to the query's dtype before the softmax."""
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


@mutant("kv-offset-in-32-bits", "specgraph.ops.paged_attention:attend_by_request")
def keys_of_31_bits(real: Any, query: Tensor, cache: KVCache, table: Tensor, *rest: Any) -> Tensor:
    """Attention finds a block's keys by 31 bits of the number of elements before it."""
    return real(query, cache, table % ((1 << 31) // cache.key[0].numel()), *rest)


@mutant("kv-offset-in-32-bits-stored", "specgraph.ops.kv_cache:cells_of")
def cells_of_31_bits(real: Any, cache: Tensor, slots: Tensor) -> Any:
    """Rows are stored at 31 bits of the number of elements before their slot."""
    return real(cache, slots % ((1 << 31) // cache[0, 0].numel()))

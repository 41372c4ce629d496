"""Decode context parallel: each of N ranks holds every N-th key of each request.

Slots, lengths and block tables of a pass are the same on every rank, those of whole requests; here they become those of
a rank's own cache. A block of B tokens is B / N cells on each rank, so slot s is cell s // N of rank s % N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.metadata import AttentionMetadata
from specgraph.ops import HostLengths, KVCache
from specgraph.ops.slots import NULL_SLOT
from specgraph.parallel import ContextParallel


def own_slots(slots: Tensor, ranks: ContextParallel | None) -> Tensor:
    """Return the cells of slots int64 [T] in a rank's own cache; NULL_SLOT for those of other ranks."""
    if ranks is None:
        return slots
    mine = (slots >= 0) & (slots % ranks.size == ranks.rank)
    return torch.where(mine, slots // ranks.size, NULL_SLOT)


def rows_of_rank(positions: Tensor, ranks: ContextParallel | None) -> Tensor | None:
    """Return which of consecutive positions int64 [T] are a rank's own, int64 [T / ranks.size]; None for all of them,
    also where the ranks cannot have equally many."""
    if ranks is None or len(positions) % ranks.size:
        return None
    every = torch.arange(0, len(positions), ranks.size, device=positions.device)
    return every + (ranks.rank - positions[:1]) % ranks.size


def all_heads(query: Tensor, ranks: ContextParallel) -> Tensor:
    """Return the queries [T, heads, head_dim] of all ranks that hold keys of the same heads, in their order."""
    if not ranks.gathers_heads:
        return query
    gathered = ops.all_gather(query, ranks.group, ranks.size).view(ranks.size, *query.shape)
    return gathered.transpose(0, 1).reshape(query.shape[0], -1, query.shape[2])


def own_heads(part: Tensor, num_heads: int, ranks: ContextParallel, dtype: torch.dtype) -> Tensor:
    """Add up the parts [T, heads, head_dim + 1] of all ranks, with one collective: [T, num_heads, head_dim]."""
    first = ranks.rank * num_heads if ranks.gathers_heads else 0
    parts = ops.all_gather(part, ranks.group, ranks.size)
    return ops.sum_parts(parts, ranks.size, first, num_heads).to(dtype)


def table_by_row(metadata: AttentionMetadata, lengths: HostLengths, rows: int) -> Tensor:
    """Return the block table for an op to which every row is a request of its own: [rows, max_blocks]."""
    table, rows_each = metadata.block_table, metadata.query_len
    if rows == table.shape[0] * rows_each:
        return table if rows_each == 1 else table[:, None].expand(-1, rows_each, -1).reshape(rows, -1)
    counts = torch.tensor(lengths.query_lens)  # a ragged batch: only eager passes have one
    return table[torch.repeat_interleave(torch.arange(len(counts)), counts).to(table.device)]


def lengths_by_row(lengths: HostLengths, causal: bool, ranks: ContextParallel | None = None) -> HostLengths:
    """Return the keys that each row sees, every row as a request of its own; only those of a rank if one is given."""
    seen: list[int] = []
    for rows, keys in zip(*lengths, strict=True):
        seen += [max(0, keys - rows + 1 + row) if causal else keys for row in range(rows)]
    if ranks is not None:
        seen = [max(0, -(-(keys - ranks.rank) // ranks.size)) for keys in seen]
    return HostLengths([1] * len(seen), seen)


def move_between(caches: Sequence[KVCache], slots: Tensor, to_slots: Tensor, ranks: ContextParallel) -> None:
    """Copy the keys and values of all layers from slot to slot, int64 [M], wherever each of them is: one collective.

    Slot 0 to slot 0 where nothing moves.
    """
    own, to = own_slots(slots, ranks), own_slots(to_slots, ranks)
    each: list[Tensor] = []
    for cache in caches:
        for part in cache[:1] if cache.key is cache.value else cache:
            cells = part.view(torch.int8)  # bytes, which all dtypes have: FP8 has no sums
            each.append(cells.view(-1, *cells.shape[2:]))
    held = [torch.where((own >= 0)[:, None], cells[own.clamp(min=0)].flatten(1), 0) for cells in each]
    moved = torch.cat(held, dim=1)
    ops.all_reduce(moved, ranks.group)
    for cells, rows in zip(each, moved.split([h.shape[1] for h in held], dim=1), strict=True):
        at = to.clamp(min=0)
        kept = torch.where((to >= 0)[:, None], rows, cells[at].flatten(1))
        cells.index_put_((at,), kept.view(-1, *cells.shape[1:]))

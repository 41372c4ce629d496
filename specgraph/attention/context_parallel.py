"""Decode context parallel: each of N ranks holds every N-th key of each request.

Slots, lengths and block tables of a pass describe whole requests, and are the same on every rank. The functions here
map them to a rank's own cache. A block of B tokens has B / N cells on each rank: slot s is cell s // N of rank s % N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.metadata import AttentionMetadata
from specgraph.ops import HostLengths
from specgraph.ops.slots import NULL_SLOT
from specgraph.parallel import ContextParallel


def own_slots(slots: Tensor, ranks: ContextParallel | None) -> Tensor:
    """Map slots, int64 [T], to cells of this rank's cache. A slot of another rank becomes NULL_SLOT."""
    if ranks is None:
        return slots
    mine = (slots >= 0) & (slots % ranks.size == ranks.rank)
    return torch.where(mine, slots // ranks.size, NULL_SLOT)


def rows_of_rank(positions: Tensor, ranks: ContextParallel | None) -> Tensor | None:
    """Return the indices of this rank's own rows, int64 [T / ranks.size]. positions: int64 [T], consecutive.

    None means all rows: there are no ranks, or T is not a multiple of their number.
    """
    if ranks is None or len(positions) % ranks.size:
        return None
    every = torch.arange(0, len(positions), ranks.size, device=positions.device)
    return every + (ranks.rank - positions[:1]) % ranks.size


def all_heads(query: Tensor, ranks: ContextParallel) -> Tensor:
    """Gather the query heads of all ranks, [T, heads, head_dim], in the order of the ranks. If the ranks have the same
    heads, `query` is returned."""
    if not ranks.gathers_heads:
        return query
    gathered = ops.all_gather(query, ranks.group, ranks.size).view(ranks.size, *query.shape)
    return gathered.transpose(0, 1).reshape(query.shape[0], -1, query.shape[2])


def own_heads(part: Tensor, num_heads: int, ranks: ContextParallel, dtype: torch.dtype) -> Tensor:
    """Add up the partial results of all ranks with one collective, and return this rank's heads.

    part: [T, heads, head_dim + 1], as `ops.attend_part` returns it. The result is [T, num_heads, head_dim].
    """
    first = ranks.rank * num_heads if ranks.gathers_heads else 0
    parts = ops.all_gather(part, ranks.group, ranks.size)
    return ops.sum_parts(parts, ranks.size, first, num_heads).to(dtype)


def table_by_row(metadata: AttentionMetadata, lengths: HostLengths, rows: int) -> Tensor:
    """Return the block table of each row, [rows, max_blocks], for an op that takes every row as a request."""
    table, rows_each = metadata.block_table, metadata.query_len
    if rows == table.shape[0] * rows_each:
        return table if rows_each == 1 else table[:, None].expand(-1, rows_each, -1).reshape(rows, -1)
    counts = torch.tensor(lengths.query_lens)  # a ragged batch: only eager passes have one
    return table[torch.repeat_interleave(torch.arange(len(counts)), counts).to(table.device)]


def lengths_by_row(lengths: HostLengths, causal: bool, ranks: ContextParallel | None = None) -> HostLengths:
    """Return the number of keys that each row sees, with every row as a request. With `ranks` only this rank's keys
    count."""
    seen: list[int] = []
    for rows, keys in zip(*lengths, strict=True):
        seen += [max(0, keys - rows + 1 + row) if causal else keys for row in range(rows)]
    if ranks is not None:
        seen = [max(0, -(-(keys - ranks.rank) // ranks.size)) for keys in seen]
    return HostLengths([1] * len(seen), seen)

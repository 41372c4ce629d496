"""Attention over the part of each request's keys that a rank holds, and the sum of the parts.

Rank r of N ranks holds the keys at positions p with p % N == r. Its cell j of a request is position j * N + r. All
ranks share a block table with blocks of block_size tokens; each rank's cache has block_size / N cells per block.
A part is [T, heads, head_dim + 1]: attention over the rank's own keys, and in the last column the log-sum-exp of the
scores. It is -inf if the row sees no key of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.ops.kv_cache import KVCache, read_cells
from specgraph.ops.library import op
from specgraph.ops.paged_attention import GATHER_BYTES, DeviceLengths, Mask, attend_seen, visible_keys


def _by_blocks(
    query: Tensor, cache: KVCache, table: Tensor, visible: Tensor, mask: Mask, rank: int, ranks: int, scale: float
) -> Tensor:
    """Run `attend_seen` for query [R, n, heads, dim] over the blocks of table [R, blocks], some blocks at a time.

    A part's copies take about GATHER_BYTES, or one block per request if that is more. `mask.ancestors` has the shape
    of `visible`, [R, n].
    """
    requests, rows, heads, _ = query.shape
    numbers = 2 * cache.key[0].numel() + 2 * cache.block_size * rows * heads  # keys, values, scores, weights
    each = max(1, requests) * numbers * torch.promote_types(query.dtype, torch.float32).itemsize
    blocks, at_once = table.shape[1], max(1, GATHER_BYTES // each)
    found = None
    for first in range(0, max(blocks, 1), at_once):
        some = table[:, first : first + at_once]
        cell = first * cache.block_size + torch.arange(some.shape[1] * cache.block_size, device=query.device)
        seen = mask.seen(cell * ranks + rank, visible, mask.ancestors)
        sinks = mask.sinks if first == 0 and rank == 0 else None
        keys, values = (read_cells(each, some, query.dtype).flatten(1, 2) for each in cache)
        part = attend_seen(query, keys, values, seen, sinks, scale)
        found = part if found is None else _added(found, part)
    assert found is not None
    return found


def _added(one: Tensor, other: Tensor) -> Tensor:
    """Combine two parts [..., head_dim + 1] into the part over the keys of both."""
    total = torch.logaddexp(one[..., -1:], other[..., -1:])
    empty = total == float("-inf")
    mine, others = ((each[..., -1:] - total).exp().masked_fill(empty, 0.0) for each in (one, other))
    return torch.cat((one[..., :-1] * mine + other[..., :-1] * others, total), dim=-1)


def _part_fake(
    query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask, rank: int, ranks: int, *,
    scale: float,
) -> Tensor:  # fmt: skip
    rows, heads, dim = query.shape
    return query.new_empty(rows, heads, dim + 1, dtype=torch.promote_types(query.dtype, torch.float32))


@op(fake=_part_fake)
def attend_part(
    query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask, rank: int, ranks: int, *,
    scale: float,
) -> Tensor:  # fmt: skip
    """Run `paged_attention` over the keys of one rank. Lengths, windows and trees count the keys of all ranks.

    Args:
        query: [T, num_heads, head_dim], rotated.
        cache: [num_blocks, block_size / ranks, num_kv_heads, head_dim].
        rank, ranks: this rank's number, and the number of ranks. Rank 0 counts the sinks.

    Returns:
        The part, float32, or float64 if the query is float64.
    """
    rows, heads, dim = query.shape
    visible, table = visible_keys(rows, lengths, block_table, mask.causal)
    if mask.ancestors is not None:
        mask = mask._replace(ancestors=mask.ancestors.view(visible.shape))
    part = _by_blocks(query.view(*visible.shape, heads, dim), cache, table, visible, mask, rank, ranks, scale)
    return part.view(rows, heads, dim + 1)


@op(writes=("out",))
def attend_part_host(
    query: Tensor, cache: KVCache, block_table: Tensor, seq_lens: Sequence[int], *, scale: float, out: Tensor
) -> None:
    """Run `attend_part` with host lengths. Every row is a request of its own: block_table is int32 [T, max_blocks].

    Row i sees the first seq_lens[i] keys of this rank. The part goes to out, [T, num_heads, head_dim + 1].
    """
    for row, seen in enumerate(seq_lens):
        blocks = block_table[None, row, : -(-seen // cache.block_size)]
        visible = torch.full((1, 1), seen, device=query.device)
        out[row] = _by_blocks(query[None, row : row + 1], cache, blocks, visible, Mask(), 0, 1, scale)[0, 0]


def _sum_fake(parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
    return parts.new_empty(parts.shape[0] // ranks, num_heads, parts.shape[2] - 1)


@op(fake=_sum_fake)
def sum_parts(parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
    """Return attention over all keys from the parts of all ranks. A row that sees no key on any rank is 0.

    Args:
        parts: [ranks * T, heads, head_dim + 1], in rank order.
        first_head, num_heads: the heads to return.

    Returns:
        [T, num_heads, head_dim].
    """
    chosen = parts.view(ranks, -1, *parts.shape[1:])[:, :, first_head : first_head + num_heads]
    total = chosen[..., -1:]
    highest = total.amax(dim=0)
    share = (total - highest.masked_fill(highest == float("-inf"), 0.0)).exp()
    share = share / share.sum(dim=0).masked_fill(highest == float("-inf"), 1.0)
    return (chosen[..., :-1] * share).sum(dim=0)

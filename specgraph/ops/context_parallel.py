"""Attention over the part of each request's keys that a rank holds, and the sum of the parts.

Of N ranks, rank r holds the keys at positions p with p % N == r: cell j of a request there is position j * N + r. A
block table numbers blocks of block_size tokens on every rank, and a rank's cache has block_size / N cells per block.
A part is [T, heads, head_dim + 1]: attention over the rank's own keys, and in the last column the logarithm of the sum
of their exponentiated scores, -inf where the rank holds no key that a row sees.
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
    """`attend_seen` of query [R, n, heads, dim] over the blocks of table [R, blocks], as many of each request at a
    time as there is memory for, at least one. Ancestors of the mask are in the shape of `visible` [R, n]."""
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
    """Return the part over the keys of two parts [..., head_dim + 1]."""
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
    """`paged_attention` over the keys that a rank holds; lengths, windows and trees are those of all keys together.

    Args:
        query: [T, num_heads, head_dim], rotated.
        cache: [num_blocks, block_size / ranks, num_kv_heads, head_dim].
        rank, ranks: the rank's number, and how many there are; rank 0 counts the sinks.

    Returns:
        The part, float32; float64 of a query in float64.
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
    """`attend_part` with host lengths, where every row is a request of its own: block_table int32 [T, max_blocks].

    seq_lens are the keys of this rank that each row sees, the first ones; out is [T, num_heads, head_dim + 1].
    """
    for row, seen in enumerate(seq_lens):
        blocks = block_table[None, row, : -(-seen // cache.block_size)]
        visible = torch.full((1, 1), seen, device=query.device)
        out[row] = _by_blocks(query[None, row : row + 1], cache, blocks, visible, Mask(), 0, 1, scale)[0, 0]


def _sum_fake(parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
    return parts.new_empty(parts.shape[0] // ranks, num_heads, parts.shape[2] - 1)


@op(fake=_sum_fake)
def sum_parts(parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
    """Return attention over all keys from the parts of all ranks; zeros for a row that sees none anywhere.

    Args:
        parts: [ranks * T, heads, head_dim + 1], in the order of ranks.
        first_head, num_heads: the heads that are asked for.

    Returns:
        [T, num_heads, head_dim].
    """
    chosen = parts.view(ranks, -1, *parts.shape[1:])[:, :, first_head : first_head + num_heads]
    total = chosen[..., -1:]
    highest = total.amax(dim=0)
    share = (total - highest.masked_fill(highest == float("-inf"), 0.0)).exp()
    share = share / share.sum(dim=0).masked_fill(highest == float("-inf"), 1.0)
    return (chosen[..., :-1] * share).sum(dim=0)

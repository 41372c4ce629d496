"""Attention over a paged KV cache: one op with device lengths, and one with host lengths.

In host memory both run the same code and give the same bits.

The KV cache holds every position. A window, or the ancestors in a draft tree, only limit the keys that a row sees. An
attention sink is one more score of each head, without a key or a value: it takes a share of the softmax (gpt-oss).
A key that a row does not see never changes its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.kv_cache import KVCache, NewRows, read_cells, rotate_and_store, rotate_and_store_on_host
from specgraph.ops.library import like_first, op

GATHER_BYTES = 256 << 20
"""The most bytes of keys and values to gather at a time. A single request may need more."""


class DeviceLengths(NamedTuple):
    """The rows and keys of each of R requests, on the device."""

    seq_lens: Tensor
    """int32 [R]: the keys of each request; a request of length 0 gives zeros."""
    query_start_loc: Tensor
    """int32 [R + 1]: the first row of each request, then T."""
    query_len: int
    """The largest number of rows of a request. If T == R * query_len, every request has this number of rows."""


class HostLengths(NamedTuple):
    """The rows and keys of each request as Python integers, for attention with host parameters.

    Both lists have one entry per request of the graph, padding included; padded requests have `seq_lens` 0.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]


class Mask(NamedTuple):
    """The keys of its request that a row sees, and the sinks in its softmax."""

    causal: bool = True
    """Row i of a request's n rows sees the first seq_len - n + 1 + i keys. If False, it sees all seq_len keys."""
    window: int = 0
    """The most keys that a row sees, its own included; 0 for all. Only with causal attention."""
    sinks: Tensor | None = None
    """[num_heads]: one score per head that takes a share of the softmax and adds no value. None for no sinks."""
    ancestors: Tensor | None = None
    """int64 [T], for the rows of a draft tree: if bit i of a row is set, the row sees key i of the last `tree_len`
    keys. It sees every key before them. At least one bit must be set. Only without `causal`."""
    tree_len: int = 0
    """The number of keys that `ancestors` is about, at most 64."""

    @property
    def has_window_or_sinks(self) -> bool:
        """The mask has a window or sinks."""
        return self.window > 0 or self.sinks is not None

    def seen(self, key: Tensor, visible: Tensor, ancestors: Tensor | None) -> Tensor:
        """Return which keys each row sees, bool [..., rows, keys].

        Args:
            key: int64 [..., keys], the number of each key in its request.
            visible: int64 [..., rows]: a row sees this number of first keys, unless window or ancestors exclude some.
            ancestors: the words of these rows, in the shape of `visible`.
        """
        seen = key < visible[..., None]
        if self.window:
            seen = seen & (key >= visible[..., None] - self.window)
        if ancestors is not None:
            place = key - (visible[..., None] - self.tree_len)
            words = ancestors[..., None].expand_as(place)  # a device's shift may not broadcast
            seen = seen & ((place < 0) | ((words >> place.clamp(0, 63)) & 1 == 1))
        return seen


def attend_request(query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """Attend with the rows of one request: query [rows, heads, dim], its keys and values [length, kv_heads, dim].

    `hidden`, bool [rows, length], is True for a key that a row does not see.
    """
    rows, heads, dim = query.shape
    length, kv_heads = keys.shape[0], keys.shape[1]
    grouped = query.float().view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped * scale, keys.float().permute(1, 2, 0))
    if hidden is not None:
        scores.view(kv_heads, -1, rows, length).masked_fill_(hidden, float("-inf"))
    out = torch.bmm(torch.softmax(scores, dim=-1), values.float().permute(1, 0, 2))
    return out.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim).to(query.dtype)


def _attend_requests(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Map query [R, n, heads, dim], keys and values [R, m, kv_heads, dim], seen [R, n, m] to [R, n, heads, dim]."""
    requests, rows, heads, dim = query.shape
    length, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    # Query heads of one KV head become rows of one matrix, so that no key is repeated.
    grouped = query.view(requests, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    out = functional.scaled_dot_product_attention(
        grouped.reshape(requests, kv_heads, group * rows, dim),
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=seen[:, None, None].expand(-1, 1, group, -1, -1).reshape(requests, 1, group * rows, length),
        scale=scale,
    )
    return out.view(requests, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4).reshape(requests, rows, heads, dim)


def attend_seen(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None, scale: float
) -> Tensor:
    """Map query [R, n, heads, dim], keys and values [R, m, kv_heads, dim], seen [R, n, m] to [R, n, heads, dim + 1].

    The last column is the log-sum-exp of the scores and of sinks [heads]. The result is float32; float64 if query is.
    """
    requests, rows, heads, dim = query.shape
    kv_heads, wide = keys.shape[2], torch.promote_types(query.dtype, torch.float32)
    # A key that no row sees is cleared, not only masked: it may hold anything, and 0 * NaN is NaN.
    unseen = ~seen.any(dim=1)[:, :, None, None]
    keys, values = (each.to(wide).masked_fill(unseen, 0.0) for each in (keys, values))
    grouped = query.to(wide).view(requests, rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rnkgd,rlkd->rkgnl", grouped, keys) * scale
    hidden = ~seen[:, None, None]
    total = scores.masked_fill(hidden, float("-inf")).logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide).view(1, kv_heads, -1, 1, 1))
    weights = (scores - total).exp().masked_fill(hidden, 0.0)
    out = torch.einsum("rkgnl,rlkd->rnkgd", weights, values).reshape(requests, rows, heads, dim)
    return torch.cat((out, total.permute(0, 3, 1, 2, 4).reshape(requests, rows, heads, 1)), dim=-1)


def visible_keys(rows: int, lengths: DeviceLengths, block_table: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the number of keys that each of T = `rows` rows sees, int64 [R, n], and its block table [R, blocks].

    If requests have different numbers of rows, every row becomes a request of its own: [T, 1] and [T, blocks].
    """
    seq_lens, starts, query_len = lengths
    requests, row = block_table.shape[0], torch.arange(rows, device=seq_lens.device)
    if rows == requests * query_len:
        request = row // query_len
    else:
        request = torch.searchsorted(starts[1:].long(), row, right=True).clamp(max=requests - 1)
        block_table, query_len = block_table[request], 1
    visible = seq_lens[request].long()
    if causal:
        visible = torch.where(visible > 0, visible - (starts[1:][request] - 1 - row), 0)
    return visible.view(-1, query_len), block_table


def _gather_and_attend(
    query: Tensor, cache: KVCache, table: Tensor, visible: Tensor, words: Tensor | None, mask: Mask, touched: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend with query [R, n, heads, dim] over `touched` blocks per request, beginning with the first one in sight."""
    block_size, blocks = cache.block_size, table.shape[1]
    first = (visible.amin(dim=1) - mask.window).clamp(min=0) // block_size if mask.window else visible[:, 0] * 0
    index = first[:, None] + torch.arange(touched, device=query.device)
    chosen = table.gather(1, index.clamp(max=blocks - 1))
    key = (index[..., None] * block_size + torch.arange(block_size, device=query.device)).flatten(1)
    seen = mask.seen(key[:, None], visible, words)
    # A key that no row sees is cleared, not only masked: it may hold anything, and 0 * NaN is NaN.
    unseen = ~seen.any(dim=1)[:, :, None, None]
    keys, values = (read_cells(part, chosen, query.dtype).flatten(1, 2).masked_fill_(unseen, 0.0) for part in cache)
    empty = visible <= 0
    if mask.has_window_or_sinks:
        out = attend_seen(query, keys, values, seen, mask.sinks, scale)[..., :-1].to(query.dtype)
    else:
        out = _attend_requests(query, keys, values, seen | empty[..., None], scale)
    return out.masked_fill(empty[..., None, None], 0.0)


def attend_by_request(
    query: Tensor, cache: KVCache, block_table: Tensor, lengths: HostLengths, mask: Mask, scale: float
) -> Tensor:
    """Attend request by request, over the blocks that its rows see: the work follows the actual lengths."""
    out, block_size, row = torch.zeros_like(query), cache.block_size, 0
    for request, (query_len, seq_len) in enumerate(zip(lengths.query_lens, lengths.seq_lens, strict=True)):
        rows = slice(row, row + query_len)
        row += query_len
        if query_len <= 0 or seq_len <= 0:
            continue
        first = max(0, seq_len - query_len + 1 - mask.window) // block_size if mask.window else 0
        blocks = block_table[request, first : -(-seq_len // block_size)]
        length = seq_len - first * block_size
        keys = read_cells(cache.key, blocks, query.dtype).flatten(0, 1)[:length]
        values = read_cells(cache.value, blocks, query.dtype).flatten(0, 1)[:length]
        hidden = None
        if mask.has_window_or_sinks or mask.ancestors is not None:
            key = torch.arange(first * block_size, seq_len, device=query.device)
            visible = torch.arange(seq_len - query_len + 1, seq_len + 1, device=query.device)
            visible = visible if mask.causal else visible.fill_(seq_len)
            words = None if mask.ancestors is None else mask.ancestors[rows]
            hidden = ~mask.seen(key, visible, words)
            if words is not None:
                values = values.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)  # may hold anything; 0 * NaN is NaN
        elif mask.causal and query_len > 1:  # the usual case, with less work than `seen` takes
            hidden = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
            hidden = hidden.triu_(seq_len - query_len + 1)
        if mask.has_window_or_sinks and hidden is not None:
            given = query[None, rows], keys[None], values[None], ~hidden[None]
            out[rows] = attend_seen(*given, mask.sinks, scale)[0, ..., :-1]
        else:
            out[rows] = attend_request(query[rows], keys, values, scale, hidden)
    return out


def _on_host(
    query: Tensor,
    cache: KVCache,
    block_table: Tensor,
    lengths: DeviceLengths,
    mask: Mask,
    new: NewRows | None = None,
    *,
    scale: float,
) -> Tensor:
    if new is not None:
        query = rotate_and_store_on_host(query, new, cache)
    starts: list[int] = lengths.query_start_loc.tolist()
    on_host = HostLengths([after - before for before, after in pairwise(starts)], lengths.seq_lens.tolist())
    return attend_by_request(query, cache, block_table, on_host, mask, scale)


@op(writes=("cache",), fake=like_first, host=_on_host)
def paged_attention(
    query: Tensor,
    cache: KVCache,
    block_table: Tensor,
    lengths: DeviceLengths,
    mask: Mask,
    new: NewRows | None = None,
    *,
    scale: float,
) -> Tensor:
    """Attend with device lengths. With `new`, run `rotate_and_store` first.

    The reference may not read a length. So it attends over the whole block table of each request, or over the blocks
    that a window can touch, and masks the keys past the length. It takes a few requests at a time, to bound memory.

    Args:
        query: [T, num_heads, head_dim], not rotated yet if `new` is given.
        cache: in the query's dtype or float8_e4m3fn. Written if `new` is given.
        block_table: int32 [R, max_blocks].
        new: the keys and values of these rows, stored before any row attends. None if the cache has them already.
        scale: factor of the scores.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, accumulated in float32.
    """
    if new is not None:
        query = rotate_and_store(query, new, cache)
    rows, heads, dim = query.shape
    visible, table = visible_keys(rows, lengths, block_table, mask.causal)
    blocks, block_size, query_len = table.shape[1], cache.block_size, visible.shape[1]
    touched = min(blocks, -(-(mask.window + query_len - 1) // block_size) + 1) if mask.window else blocks
    at_once = max(1, GATHER_BYTES // (2 * touched * cache.key[0].numel() * cache.key.element_size()))
    given = [query.reshape(-1, query_len, heads, dim), table, visible]
    if mask.ancestors is not None:
        given.append(mask.ancestors.view(visible.shape))
    parts = [
        _gather_and_attend(q, cache, t, v, words[0] if words else None, mask, touched, scale)
        for q, t, v, *words in zip(*(each.split(at_once) for each in given), strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows, heads, dim)


@op(writes=("cache", "out"))
def paged_attention_host(
    query: Tensor,
    cache: KVCache,
    block_table: Tensor,
    lengths: HostLengths,
    mask: Mask,
    new: NewRows | None = None,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Run `paged_attention` with host lengths into a preallocated `out`, so that a task update can issue it again.

    The other arguments are as in `paged_attention`.

    Args:
        lengths: rows and keys per request. A request without rows or without keys gives zeros.
        out: [T, num_heads, head_dim] in the query's dtype, written.
    """
    if new is not None:
        query = rotate_and_store(query, new, cache)
    out.copy_(attend_by_request(query, cache, block_table, lengths, mask, scale))

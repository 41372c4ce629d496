"""Attention over a paged KV cache, with device lengths and with host lengths.

`paged_attention` and `rotate_store_attend` read sequence lengths from device tensors. `paged_attention_host` and
`rotate_store_attend_host` take them as Python integers, which a graph bakes in and a task update rewrites. In host
memory both run the same code and give the same bits.
What lies past a request's own length never reaches its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.kv_cache import read_cells, rotate_and_store, rotate_and_store_on_host
from specgraph.ops.library import like_query, op

GATHER_BYTES = 256 << 20
"""At most this many bytes of keys and values are gathered at a time, unless one request alone has more."""


def attend_gathered(
    query: Tensor,
    visible: Tensor,
    block_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    hidden: Tensor | None = None,
) -> Tensor:
    """query [R, n, heads, dim], visible [R, n] keys per row, block_table [R, blocks] -> [R, n, heads, dim].

    `hidden`, bool [R, n, blocks * block_size], takes keys out of those that a row sees; one must be left.
    """
    requests, query_len, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    width = block_table.shape[1] * block_size
    group = heads // kv_heads
    key = torch.arange(width, device=query.device)
    # What no row may see is cleared, not only masked: it may hold anything, and 0 * NaN is NaN.
    unseen = key >= visible.amax(dim=1)[:, None]
    if hidden is not None:
        unseen = unseen | hidden.all(dim=1)
    unseen = unseen[:, :, None, None]
    keys, values = (
        read_cells(cache, block_table, query.dtype).reshape(requests, width, kv_heads, dim).masked_fill_(unseen, 0.0)
        for cache in (key_cache, value_cache)
    )
    # Query heads of one KV head become rows of one matrix, so that no key is repeated.
    grouped = query.view(requests, query_len, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    mask = key < visible.clamp(min=1)[:, :, None]  # a row that sees nothing is cleared below
    if hidden is not None:
        mask = mask & ~hidden
    out = functional.scaled_dot_product_attention(
        grouped.reshape(requests, kv_heads, group * query_len, dim),
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=mask[:, None, None].expand(-1, 1, group, -1, -1).reshape(requests, 1, group * query_len, width),
        scale=scale,
    )
    out = out.view(requests, kv_heads, group, query_len, dim).permute(0, 3, 1, 2, 4)
    return out.masked_fill((visible <= 0)[:, :, None, None, None], 0.0).reshape(requests, query_len, heads, dim)


def visible_keys(
    rows: int, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, query_len: int, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """How many keys each of T = `rows` rows sees, int64 [R, n] of n rows per request, and block_table [R, blocks].

    Where requests have different numbers of rows, every row becomes a request of its own: [T, 1] and [T, blocks].
    """
    requests = block_table.shape[0]
    row = torch.arange(rows, device=seq_lens.device)
    if rows == requests * query_len:
        request = row // query_len
    else:
        request = torch.searchsorted(query_start_loc[1:].long(), row, right=True).clamp(max=requests - 1)
        block_table, query_len = block_table[request], 1
    visible = seq_lens[request].long()
    if causal:
        visible = torch.where(visible > 0, visible - (query_start_loc[1:][request] - 1 - row), 0)
    return visible.view(-1, query_len), block_table


def requests_at_once(key_cache: Tensor, max_blocks: int) -> int:
    """How many requests `attend_gathered` takes at a time, so that memory stays bounded."""
    return max(1, GATHER_BYTES // (2 * max_blocks * key_cache[0].numel() * key_cache.element_size()))


def attend_request(query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """One request: query [rows, heads, dim] against its own keys and values [length, kv_heads, dim].

    `hidden`, bool [rows, length], says what each row does not see.
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


def _per_request(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    causal: bool,
) -> Tensor:
    """One request after the other, so that the work follows the actual lengths."""
    out = torch.zeros_like(query)
    block_size = key_cache.shape[1]
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len > 0 and seq_len > 0:
            blocks = block_table[request, : -(-seq_len // block_size)]
            keys = read_cells(key_cache, blocks, query.dtype).flatten(0, 1)[:seq_len]
            values = read_cells(value_cache, blocks, query.dtype).flatten(0, 1)[:seq_len]
            hidden = None
            if causal and query_len > 1:
                hidden = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
                hidden = hidden.triu_(seq_len - query_len + 1)
            out[row : row + query_len] = attend_request(query[row : row + query_len], keys, values, scale, hidden)
        row += query_len
    return out


def _on_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    query_len: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    starts: list[int] = query_start_loc.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    return _per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens.tolist(), scale, causal)


@op(fake=like_query, host=_on_host)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    query_len: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Attention with device lengths.

    The reference attends over the whole width of each request's block table and masks what is past its length, because
    it may not read a length. It takes a few requests at a time, so that memory stays bounded.

    Args:
        query: [T, num_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of any strides; in the query's dtype
            or float8_e4m3fn.
        block_table: int32 [R, max_blocks].
        seq_lens: int32 [R]; a request of length 0 gives zeros.
        query_start_loc: int32 [R + 1]: first row of each request, then T.
        query_len: the most rows of one request. If T == R * query_len, every request has that many.
        scale: factor of the scores.
        causal: row i of a request's n rows sees its first seq_len - n + 1 + i keys; otherwise all seq_len.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, accumulated in float32.
    """
    rows, heads, dim = query.shape
    visible, block_table = visible_keys(rows, block_table, seq_lens, query_start_loc, query_len, causal)
    query = query.reshape(*visible.shape, heads, dim)
    at_once = requests_at_once(key_cache, block_table.shape[1])
    split = zip(query.split(at_once), visible.split(at_once), block_table.split(at_once), strict=True)
    parts = [attend_gathered(q, v, t, key_cache, value_cache, scale) for q, v, t in split]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows, heads, dim)


@op(writes=("out",))
def paged_attention_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor,
) -> None:
    """Attention with host lengths, into a preallocated `out`, so that a task update can issue it again.

    Args:
        query_lens, seq_lens: rows and visible keys per request; a request without either gives zeros.
        out: [T, num_heads, head_dim] in the query's dtype, written. The others are as in `paged_attention`.
    """
    out.copy_(_per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens, scale, causal))


def _rotate_store_attend_on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    query_len: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """The host implementations of the two ops, called without a dispatch."""
    query = rotate_and_store_on_host(query, key, value, rotary, positions, slot_mapping, key_cache, value_cache)
    attended = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    return _on_host(*attended, query_len=query_len, scale=scale, causal=causal)


@op(writes=("key_cache", "value_cache"), fake=like_query, host=_rotate_store_attend_on_host)
def rotate_store_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    query_len: int,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """`rotate_and_store`, then `paged_attention` with the rotated query. Arguments and result as in those."""
    query = rotate_and_store(query, key, value, rotary, positions, slot_mapping, key_cache, value_cache)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        query_len=query_len,
        scale=scale,
        causal=causal,
    )


@op(writes=("key_cache", "value_cache", "out"))
def rotate_store_attend_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor,
) -> None:
    """`rotate_and_store`, then `paged_attention_host` with the rotated query. Arguments as in those."""
    query = rotate_and_store(query, key, value, rotary, positions, slot_mapping, key_cache, value_cache)
    paged_attention_host(
        query, key_cache, value_cache, block_table, query_lens, seq_lens, scale=scale, causal=causal, out=out
    )

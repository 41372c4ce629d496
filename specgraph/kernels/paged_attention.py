"""Attention over a paged KV cache, in two flavours of one computation.

`paged_attention` reads lengths from device tensors; `paged_attention_host` takes them as host integers, baked into
the captured task as on Ascend. Both give the same bits on the host implementation, and neither looks past a
request's own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.library import define, like_query


def dense_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_len: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Capturable on any device: every row looks at the whole width of its block table, masked."""
    rows, heads, dim = query.shape
    kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    width = block_table.shape[1] * block_size
    row = torch.arange(rows, device=query.device)
    request = torch.searchsorted(query_start_loc[1:].long(), row, right=True).clamp(max=block_table.shape[0] - 1)
    end = query_start_loc[1:].long()[request]
    seq_len = seq_lens.long()[request]
    visible = seq_len - (end - 1 - row) if causal else seq_len
    visible = torch.where(seq_len > 0, visible, 0)
    blocks = block_table.long()[request]
    keys = key_cache[blocks].view(rows, width, kv_heads, dim).float()
    values = value_cache[blocks].view(rows, width, kv_heads, dim).float()
    mask = torch.arange(width, device=query.device) < visible[:, None]
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim).float()
    scores = torch.einsum("tkgd,twkd->tkgw", grouped, keys) * scale
    scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    values = values.masked_fill(~mask[:, :, None, None], 0.0)
    return torch.einsum("tkgw,twkd->tkgd", weights, values).reshape(rows, heads, dim).to(query.dtype)


def _request(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Tensor:
    """One request: query [q, heads, dim] against its own keys and values [n, kv_heads, dim]."""
    rows, heads, dim = query.shape
    length, kv_heads = keys.shape[0], keys.shape[1]
    grouped = query.float().view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped * scale, keys.float().permute(1, 2, 0))
    if causal and rows > 1:
        hidden = torch.ones(rows, length, dtype=torch.bool, device=scores.device).triu_(length - rows + 1)
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
    """Host implementation: the work follows the actual lengths."""
    out = torch.zeros_like(query)
    block_size = key_cache.shape[1]
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len > 0 and seq_len > 0:
            blocks = block_table[request, : -(-seq_len // block_size)]
            keys = key_cache[blocks].flatten(0, 1)[:seq_len]
            values = value_cache[blocks].flatten(0, 1)[:seq_len]
            out[row : row + query_len] = _request(query[row : row + query_len], keys, values, scale, causal)
        row += query_len
    return out


def _on_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_len: int,
    scale: float,
    causal: bool,
) -> Tensor:
    starts: list[int] = query_start_loc.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    return _per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens.tolist(), scale, causal)


_paged_attention_op = define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, int query_len, float scale, bool causal) -> Tensor",
    reference=dense_attention,
    fake=like_query,
    host=_on_host,
)


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

    Args:
        query: [T, num_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: int32 [R, max_blocks].
        seq_lens: int32 [R]; a request of length 0 gives zeros.
        query_start_loc: int32 [R + 1].
        query_len: the most rows of one request; rows are uniform when T == R * query_len.
        causal: row i of q sees seq_len - q + 1 + i keys, else all seq_len.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, accumulated in float32.
    """
    return _paged_attention_op(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, query_len, scale, causal
    )


def _host_lengths(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    causal: bool,
    *,
    out: Tensor,
) -> Tensor:
    return out.copy_(_per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens, scale, causal))


def _given_out(*args: Any, out: Tensor) -> Tensor:
    return out


_paged_attention_host_op = define(
    "paged_attention_host.out(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
    " int[] query_lens, int[] seq_lens, float scale, bool causal, *, Tensor(a!) out) -> Tensor(a!)",
    reference=_host_lengths,
    fake=_given_out,
)


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
) -> Tensor:
    """Attention with lengths as host integers, into a preallocated `out`, so that a task update can issue it again.

    Args: as in `paged_attention`, with one entry a request in `query_lens` and `seq_lens`.
    """
    return _paged_attention_host_op(
        query, key_cache, value_cache, block_table, query_lens, seq_lens, scale, causal, out=out
    )

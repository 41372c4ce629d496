"""Causal paged attention over a sliding window, with or without attention sinks, by device lengths and by host lengths.

The KV cache still holds every position; a window only limits which keys a row sees, so that blocks, slots and rejected
rows are those of full attention. An attention sink is one more score of each head, without a key and a value: it takes
a share of the softmax (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specgraph.ops.kv_cache import read_cells
from specgraph.ops.library import like_query, op
from specgraph.ops.paged_attention import visible_keys


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """query [R, n, heads, dim], keys and values [R, m, kv_heads, dim], seen [R, n, m] -> [R, n, heads, dim]."""
    requests, rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    grouped = query.float().view(requests, rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rnkgd,rlkd->rkgnl", grouped, keys.float()) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    # Without a sink, a score that only keeps the softmax of a row that sees nothing finite.
    sink = scores.new_full((heads,), -1e30) if sinks is None else sinks.float()
    sink = sink.view(1, kv_heads, -1, 1, 1).expand(requests, -1, -1, rows, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.einsum("rkgnl,rlkd->rnkgd", weights, values.float())
    return out.reshape(requests, rows, heads, dim).to(query.dtype)


def _per_request(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    sinks: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    """One request after the other, over the blocks that its rows see."""
    out, block_size, row = torch.zeros_like(query), key_cache.shape[1], 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len > 0 and seq_len > 0:
            first = max(0, seq_len - query_len + 1 - window) // block_size if window else 0
            blocks = block_table[request, first : -(-seq_len // block_size)]
            rows = slice(row, row + query_len)
            visible = torch.arange(seq_len - query_len + 1, seq_len + 1, device=query.device)
            key = torch.arange(first * block_size, seq_len, device=query.device)
            keys, values = (
                read_cells(cache, blocks, query.dtype).flatten(0, 1)[: key.shape[0]]
                for cache in (key_cache, value_cache)
            )
            seen = _seen(visible, key, window)
            out[rows] = _attend(query[None, rows], keys[None], values[None], seen[None], sinks, scale)[0]
        row += query_len
    return out


def _seen(visible: Tensor, key: Tensor, window: int) -> Tensor:
    """Whether a row that causally sees its first `visible` keys sees each `key`: bool [..., rows, keys]."""
    seen = key < visible[..., None]
    return seen & (key >= visible[..., None] - window) if window else seen


def _on_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor | None,
    *,
    query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    starts: list[int] = query_start_loc.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    return _per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens.tolist(), sinks, scale, window)


@op(fake=like_query, host=_on_host)
def windowed_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor | None,
    *,
    query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Causal attention in which a row sees its own key and the `window - 1` keys before it, with device lengths.

    The reference gathers as many blocks per request as a window can touch, however long the context is.

    Args:
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, query_len, scale: as in
            `paged_attention`.
        sinks: [num_heads], one score per head that takes part in the softmax and adds nothing; None for none.
        window: keys that a row sees at most, its own included; 0 for all.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, accumulated in float32.
    """
    rows, heads, dim = query.shape
    blocks, block_size = block_table.shape[1], key_cache.shape[1]
    visible, block_table = visible_keys(rows, block_table, seq_lens, query_start_loc, query_len)
    query_len = visible.shape[1]
    touched = min(blocks, -(-(window + query_len - 1) // block_size) + 1) if window else blocks
    first = ((visible.amin(dim=1) - window).clamp(min=0) // block_size) if window else visible[:, 0] * 0
    index = first[:, None] + torch.arange(touched, device=query.device)
    chosen = block_table.gather(1, index.clamp(max=blocks - 1)).long()
    key = (index[..., None] * block_size + torch.arange(block_size, device=query.device)).flatten(1)
    seen = _seen(visible, key[:, None], window)
    # What no row sees is cleared, not only masked: it may hold anything, and 0 * NaN is NaN.
    unseen = ~seen.any(dim=1)[:, :, None, None]
    keys, values = (
        read_cells(cache, chosen, query.dtype).flatten(1, 2).masked_fill(unseen, 0.0)
        for cache in (key_cache, value_cache)
    )
    out = _attend(query.reshape(-1, query_len, heads, dim), keys, values, seen, sinks, scale)
    return out.masked_fill((visible <= 0)[..., None, None], 0.0).view(rows, heads, dim)


@op(writes=("out",))
def windowed_attention_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    sinks: Tensor | None,
    *,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """`windowed_attention` with host lengths, into a preallocated `out`, so that a task update can issue it again.

    Args:
        query_lens, seq_lens, out: as in `paged_attention_host`; the others as in `windowed_attention`.
    """
    out.copy_(_per_request(query, key_cache, value_cache, block_table, query_lens, seq_lens, sinks, scale, window))

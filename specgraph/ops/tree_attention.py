"""Attention of the rows of a draft tree: all of the context, and behind it only a row's own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.kv_cache import read_cells
from specgraph.ops.library import like_query, op
from specgraph.ops.paged_attention import attend_gathered, attend_request, requests_at_once


def hidden_keys(key: Tensor, seq_lens: Tensor, ancestors: Tensor, tree_len: int) -> Tensor:
    """Which keys the rows of a tree do not see though they are within the request's length.

    Args:
        key: int64 [W], key numbers.
        seq_lens: int [...], per row; ancestors: int64 [...].
        tree_len: as in `tree_attention`.

    Returns:
        bool [..., W]
    """
    place = key - (seq_lens[..., None] - tree_len)
    words = ancestors[..., None].expand_as(place)  # a device's shift may not broadcast
    seen = (words >> place.clamp(0, 63)) & 1
    return (place >= 0) & (seen == 0)


def _tree_attention_on_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    ancestors: Tensor,
    *,
    tree_len: int,
    scale: float,
) -> Tensor:
    out = torch.zeros_like(query)
    rows, block_size = query.shape[0] // seq_lens.shape[0], key_cache.shape[1]
    lengths: list[int] = seq_lens.tolist()
    for request, length in enumerate(lengths):
        if length > 0:
            blocks, own = block_table[request, : -(-length // block_size)], slice(request * rows, (request + 1) * rows)
            hidden = hidden_keys(torch.arange(length), seq_lens[request].expand(rows), ancestors[own], tree_len)
            keys, values = (
                read_cells(cache, blocks, query.dtype).flatten(0, 1)[:length] for cache in (key_cache, value_cache)
            )
            values = values.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)  # may hold anything; 0 * NaN is NaN
            out[own] = attend_request(query[own], keys, values, scale, hidden)
    return out


@op(fake=like_query, host=_tree_attention_on_host)
def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    ancestors: Tensor,
    *,
    tree_len: int,
    scale: float,
) -> Tensor:
    """Attention with device lengths and an ancestor mask over the last `tree_len` keys of each request.

    Args:
        query: [T, num_heads, head_dim]; every request has T / R rows.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of any strides.
        block_table: int32 [R, max_blocks].
        seq_lens: int32 [R]: keys of the context and of the tree; a request of length 0 gives zeros.
        ancestors: int64 [T]: a row sees key seq_len - tree_len + i of the tree if bit i is set, and it sees every key
            before. At least one bit is set.
        tree_len: at most 64.
        scale: factor of the scores.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, accumulated in float32.
    """
    rows, heads, dim = query.shape
    requests, blocks = block_table.shape
    visible = seq_lens[:, None].expand(requests, rows // requests)
    key = torch.arange(blocks * key_cache.shape[1], device=query.device)
    at_once = requests_at_once(key_cache, blocks)
    inputs = (query.view(requests, -1, heads, dim), visible, block_table, ancestors.view(requests, -1))
    parts = [
        attend_gathered(q, v, table, key_cache, value_cache, scale, hidden_keys(key, v, bits, tree_len))
        for q, v, table, bits in zip(*(each.split(at_once) for each in inputs), strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows, heads, dim)

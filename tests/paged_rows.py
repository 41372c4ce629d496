"""Rows and paged caches for attention ops, and a float64 loop over them."""

from __future__ import annotations

import torch


def attention64(query, key_cache, value_cache, blocks, query_lens, seq_lens, scale, causal, window=0, sinks=None):
    """One row, one head, one visible key after the other; `sinks` [heads] are keys of a given score and of value 0."""
    block_size, groups = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    row = 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        places = [(blocks[request][p // block_size], p % block_size) for p in range(length)]
        for i in range(count):
            visible = places[: length - count + 1 + i] if causal else places
            visible = visible[-window:]
            for head in range(query.shape[1]):
                if visible:
                    keys = torch.stack([key_cache[b, o, head // groups] for b, o in visible]).double()
                    values = torch.stack([value_cache[b, o, head // groups] for b, o in visible]).double()
                    scores = keys @ query[row + i, head].double() * scale
                    if sinks is not None:
                        scores, values = torch.cat([scores, sinks[head, None]]), torch.cat([values, values[:1] * 0])
                    out[row + i, head] = torch.softmax(scores, dim=0) @ values
        row += count
    return out


def make(query_lens, seq_lens, *, block_size, heads, kv_heads, dim=8, dtype=torch.float32, seed=0, spare=1):
    """Caches full of junk (NaN where nobody may look), block tables in random order, null blocks at the end."""
    g = torch.Generator().manual_seed(seed)
    width = max(-(-length // block_size) for length in seq_lens) + spare
    needed = [-(-length // block_size) for length in seq_lens]
    order = (1 + torch.randperm(sum(needed), generator=g)).tolist()
    shape = (sum(needed) + 1, block_size, kv_heads, dim)
    key_cache, value_cache = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    table, blocks = torch.zeros(len(seq_lens), width, dtype=torch.int32), []
    for r, (count, length) in enumerate(zip(needed, seq_lens, strict=True)):
        blocks.append([order.pop() for _ in range(count)])
        table[r, :count] = torch.tensor(blocks[-1], dtype=torch.int32)
        for place in range(length, count * block_size):
            key_cache[blocks[-1][-1], place % block_size] = 1e4
            value_cache[blocks[-1][-1], place % block_size] = float("nan")
    key_cache[0], value_cache[0] = 1e4, float("nan")
    query = torch.randn(sum(query_lens), heads, dim, generator=g).to(dtype)
    return (query, key_cache, value_cache, table), blocks

"""Rotary embedding of queries and keys and the write to the paged KV cache, as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import like_query, op
from specgraph.ops.linear_fp8 import FP8


def rotate(x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by the rows of `rotary` at `positions`, in float32; see `rotate_and_store`."""
    cos, sin = rotary[positions].to(torch.float32)[:, None, :].chunk(2, dim=-1)
    half = cos.shape[-1]
    left, right = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def bytes_of(cache: Tensor) -> Tensor:
    """The cache, or the bytes of an FP8 cache as uint8: torch has no index ops for FP8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def as_cells(rows: Tensor, cache: Tensor) -> Tensor:
    """What is stored of `rows` in a cache: `rows` in its dtype. In FP8 what is beyond its largest value, 448, becomes
    that, and the result is uint8, to be written to `bytes_of(cache)`."""
    if cache.dtype != FP8:
        return rows.to(cache.dtype)
    return rows.clamp(-448.0, 448.0).to(FP8).view(torch.uint8)


def read_cells(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """cache[index]; of an FP8 cache in `dtype`."""
    return cache[index] if cache.dtype != FP8 else bytes_of(cache)[index].view(FP8).to(dtype)


def cells_of(cache: Tensor, slots: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A view of the cache's memory (`bytes_of`), and the index in it that gives the slots int64 [T]:
    [T, num_kv_heads, head_dim]."""
    cache = bytes_of(cache)
    if cache.is_contiguous():
        return cache.view(-1, *cache.shape[2:]), (slots,)
    return cache, (slots // cache.shape[1], slots % cache.shape[1])


def rotate_and_store_on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    if rotary is not None:  # both at once: on few rows the number of calls decides
        rotated = rotate(torch.cat([query, key], dim=1), rotary, positions)
        query, key = rotated.split([query.shape[1], key.shape[1]], dim=1)
    live = slot_mapping >= 0
    if not bool(live.all()):
        key, value, slot_mapping = key[live], value[live], slot_mapping[live]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cells, place = cells_of(cache, slot_mapping)
        if len(place) == 1:
            cells.index_copy_(0, place[0], as_cells(rows, cache))  # cheaper than index_put_
        else:
            cells.index_put_(place, as_cells(rows, cache))
    return query.clone() if rotary is None else query.contiguous()


@op(writes=("key_cache", "value_cache"), fake=like_query, host=rotate_and_store_on_host)
def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Rotate query and key, write key and value to the cache at their slots, and return the rotated query.

    Rotation is in float32 and pairs element i with element i + rotary_dim / 2. Elements past rotary_dim pass through.

    Args:
        query: [T, num_heads, head_dim].
        key, value: [T, num_kv_heads, head_dim].
        rotary: float32 [max_positions, rotary_dim] (cos | sin), or None for no rotation.
        positions: int64 [T].
        slot_mapping: int64 [T]; a row with a negative slot is not written.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of any strides, written; in the dtype
            of keys and values, or float8_e4m3fn.

    Returns:
        [T, num_heads, head_dim] in the query's dtype: a new tensor, also without rotation.
    """
    if rotary is not None:
        query, key = rotate(query, rotary, positions), rotate(key, rotary, positions)
    live = (slot_mapping >= 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cells, place = cells_of(cache, slots)
        # An inert row writes slot 0 back as it was: slot 0 is in the null block, which no live row writes.
        cells.index_put_(place, torch.where(live, as_cells(rows, cache), cells[place]))
    return query.clone() if rotary is None else query

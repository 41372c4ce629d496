"""The op that rotates queries and keys, and stores keys and values in the paged KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops.library import like_first, op
from specgraph.ops.linear import FP8


class KVCache(NamedTuple):
    """One layer's paged keys and values, each [num_blocks, block_size, num_kv_heads, head_dim] of any strides.

    Both are the same tensor if values are the latent part of keys.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key.shape[1]


class NewRows(NamedTuple):
    """The keys and values of one pass, to be rotated and stored."""

    key: Tensor
    """[T, num_kv_heads, head_dim], not rotated yet."""
    value: Tensor
    """[T, num_kv_heads, head_dim]"""
    rotary: Tensor | None
    """float32 [max_positions, rotary_dim] (cos | sin), or None for no rotation."""
    positions: Tensor
    """int64 [T]"""
    slot_mapping: Tensor
    """int64 [T]; a row with a negative slot is not written."""


def rotate(x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by the rows of `rotary` at `positions`, in float32, as `rotate_and_store` does."""
    cos, sin = rotary[positions].to(torch.float32)[:, None, :].chunk(2, dim=-1)
    half = cos.shape[-1]
    left, right = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def rotate_pairs(x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
    """Rotate the last rotary_dim elements of x [T, heads, dim], each one with its neighbour: 2i with 2i + 1."""
    plain, pairs = x.tensor_split((x.shape[-1] - rotary.shape[1],), dim=-1)
    halves = rotate(pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rotary, positions)
    return torch.cat((plain, halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)), dim=-1)


def bytes_of(cache: Tensor) -> Tensor:
    """Return the cache, or the bytes of an FP8 cache as uint8: torch has no index ops for FP8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def as_cells(rows: Tensor, cache: Tensor) -> Tensor:
    """Return `rows` in the dtype of the cache.

    For an FP8 cache, values are clamped to its largest value, 448, and the result is uint8, to be written to
    `bytes_of(cache)`.
    """
    if cache.dtype != FP8:
        return rows.to(cache.dtype)
    return rows.clamp(-448.0, 448.0).to(FP8).view(torch.uint8)


def read_cells(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cache[index], converted to `dtype` if the cache is FP8."""
    return cache[index] if cache.dtype != FP8 else bytes_of(cache)[index].view(FP8).to(dtype)


def cells_of(cache: Tensor, slots: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a view of `bytes_of(cache)`, and the index in it that selects `slots`, int64 [T].

    view[index] is [T, num_kv_heads, head_dim].
    """
    cache = bytes_of(cache)
    if cache.is_contiguous():
        return cache.view(-1, *cache.shape[2:]), (slots,)
    return cache, (slots // cache.shape[1], slots % cache.shape[1])


def rotate_and_store_on_host(query: Tensor, new: NewRows, cache: KVCache) -> Tensor:
    key, value, rotary, positions, slots = new
    if rotary is not None:  # both at once: with few rows the number of calls decides the time
        rotated = rotate(torch.cat([query, key], dim=1), rotary, positions)
        query, key = rotated.split([query.shape[1], key.shape[1]], dim=1)
    live = slots >= 0
    if not bool(live.all()):
        key, value, slots = key[live], value[live], slots[live]
    for rows, part in ((key, cache.key), (value, cache.value)):
        cells, place = cells_of(part, slots)
        if len(place) == 1:
            cells.index_copy_(0, place[0], as_cells(rows, part))  # cheaper than index_put_
        else:
            cells.index_put_(place, as_cells(rows, part))
    return query.clone() if rotary is None else query.contiguous()


@op(writes=("cache",), fake=like_first, host=rotate_and_store_on_host)
def rotate_and_store(query: Tensor, new: NewRows, cache: KVCache) -> Tensor:
    """Rotate query and key, write key and value to the cache at their slots, and return the rotated query.

    Rotation is in float32 and pairs element i with element i + rotary_dim / 2. Elements past rotary_dim pass through.

    Args:
        query: [T, num_heads, head_dim].
        cache: written; in the dtype of keys and values, or float8_e4m3fn.

    Returns:
        [T, num_heads, head_dim] in the query's dtype. It is a new tensor, even if nothing is rotated.
    """
    key, value, rotary, positions, slots = new
    if rotary is not None:
        query, key = rotate(query, rotary, positions), rotate(key, rotary, positions)
    live = (slots >= 0)[:, None, None]
    for rows, part in ((key, cache.key), (value, cache.value)):
        cells, place = cells_of(part, slots.clamp(min=0))
        # An inert row writes the contents of slot 0 back to it. No live row writes slot 0: it is in the null block.
        cells.index_put_(place, torch.where(live, as_cells(rows, part), cells[place]))
    return query.clone() if rotary is None else query

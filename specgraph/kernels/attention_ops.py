"""Launching the Triton kernels of paged attention and cache writes."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
from torch import Tensor

from specgraph import ops
from specgraph.kernels import attention, rows
from specgraph.kernels.launch import AttentionShape, Launcher, ceil_div, power_of_two
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows
from specgraph.ops.linear import FP8

MOST_LISTED = 32
"""Requests whose splits start in the order of their keys. Each program compares the lengths of all with each other."""


class AttentionOps(Launcher):
    """Implementations of the ops in `specgraph.ops.kv_cache`, `specgraph.ops.paged_attention` and
    `specgraph.ops.context_parallel`."""

    __slots__ = ()

    def rotate_and_store(self, query: Tensor, new: NewRows, cache: KVCache) -> Tensor:
        if self._refuses("rotate_and_store", cache):
            return NotImplemented
        key, value, rotary, positions, slots = new
        query, key, value = _heads(query), _heads(key), _heads(value)
        count, heads, dim = query.shape
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        total = heads + 2 * key.shape[1]
        per_program = 16
        if count:
            self.launch(
                rows.rotate_and_store_kernel, (count, ceil_div(total, per_program)),
                query, key, value, rotary, positions.contiguous(), slots.contiguous(), out, cache.key, cache.value,
                query.stride(0), key.stride(0), value.stride(0), 0 if rotary is None else rotary.stride(0), heads,
                key.shape[1], **cache_layout(cache.key), DIM=dim, DIMS=power_of_two(dim),
                HALF=0 if rotary is None else rotary.shape[1] // 2, HEADS=per_program, num_warps=4,
            )  # fmt: skip
        return out

    def paged_attention(
        self, query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask,
        new: NewRows | None = None, *, scale: float,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.paged_attention`: without windows and sinks; storing in the same kernel where every
        request has one row."""
        if mask.is_windowed or self._refuses("attention", cache, query.shape[2]):
            return NotImplemented
        if new is not None:
            single = lengths.query_len == 1 and len(query) == len(lengths.seq_lens) and mask.ancestors is None
            if not single or (new.rotary is not None and new.rotary.shape[1] != query.shape[2]):
                query, new = ops.rotate_and_store(query, new, cache), None
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return self._attend(query, cache, block_table, lengths, mask, new, scale, out)

    def attend_part(
        self, query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask, rank: int,
        ranks: int, *, scale: float,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.attend_part`: without windows and sinks."""
        if mask.is_windowed or self._refuses("attention over a rank's keys", cache, query.shape[2]):
            return NotImplemented
        rows, heads, dim = query.shape
        out = torch.empty((rows, heads, dim + 1), dtype=torch.float32, device=query.device)
        return self._attend(query, cache, block_table, lengths, mask, None, scale, out, rank, ranks)

    def sum_parts(self, parts: Tensor, ranks: int, first_head: int, num_heads: int) -> Tensor:
        rows, heads, dim = parts.shape[0] // ranks, parts.shape[1], parts.shape[2] - 1
        out = torch.empty((rows, num_heads, dim), dtype=parts.dtype, device=parts.device)
        if rows:
            per_program = 4
            self.launch(
                attention.sum_parts_kernel, (ceil_div(rows * num_heads, per_program),), parts.contiguous(), out,
                rows * num_heads, heads, first_head, num_heads, rows * heads * (dim + 1), DIM=dim,
                DIMS=power_of_two(dim), RANKS=ranks, ITEMS=per_program, num_warps=4,
            )  # fmt: skip
        return out

    def _attend(
        self, query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask,
        new: NewRows | None, scale: float, out: Tensor, rank: int = 0, ranks: int = 1,
    ) -> Tensor:  # fmt: skip
        """Attend to the keys that a rank holds, into `out`, with their log-sum-exp where its rows have a place for
        it."""
        count, heads, dim = query.shape
        seq_lens, starts, query_len = lengths
        requests, kv_heads = seq_lens.shape[0], cache.key.shape[2]
        query = _heads(query)
        if count == 0:
            return out
        key = value = rotary = positions = slots = ancestors = None
        if new is not None:
            key, value, rotary, positions, slots = new
            key, value = _heads(key), _heads(value)
            if key.stride(0) != value.stride(0):
                key, value = key.contiguous(), value.contiguous()
        if mask.ancestors is not None:  # every request has as many rows
            ancestors, starts, query_len = mask.ancestors.contiguous(), None, count // requests
        group = heads // kv_heads
        tile = self.options.attention(
            AttentionShape(
                rows=query_len * group, pairs=requests * kv_heads, context=block_table.shape[1] * cache.block_size,
                head_dim=dim, itemsize=query.element_size(), cache_itemsize=cache.key.element_size(),
                compute_units=self.options.compute_units,
            )
        )  # fmt: skip
        splits, tiles = tile.splits, ceil_div(query_len * group, tile.rows)
        span = tile.span if splits > 1 else 0
        partial = top = total = None
        if splits > 1:
            partial, top, total = (
                torch.empty((count * heads, splits, *last), dtype=torch.float32, device=query.device)
                for last in ((dim,), (), ())
            )
        self.launch(
            attention.attend_kernel, (kv_heads, splits, requests * tiles),
            query, key, value, rotary, positions, slots, *cache, block_table, seq_lens, starts, ancestors, out,
            partial, top, total, query.stride(0), 0 if key is None else key.stride(0),
            0 if rotary is None else rotary.stride(0), block_table.stride(0), block_table.shape[1], heads, scale,
            mask.tree_len, requests, rank, GROUP=group, HALF=dim // 2, HALVES=power_of_two(max(dim // 2, 16)),
            **cache_layout(cache.key), ROWS=tile.rows, KEYS=tile.keys, SPLITS=splits, SPAN=span, TILES=tiles,
            CAUSAL=mask.causal,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", UNIFORM=query_len if starts is None else 0,
            REQUESTS=power_of_two(requests) if span and requests <= MOST_LISTED else 0, RANKS=ranks,
            WIDTH=out.shape[2],
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            items = 4 if splits <= 16 else 1
            self.launch(
                attention.combine_kernel, (ceil_div(count * heads, items),),
                partial, top, total, out, count * heads, DIM=dim, DIMS=power_of_two(dim), SPLITS=splits, SPAN=span,
                ITEMS=items, WIDTH=out.shape[2], num_warps=4,
            )  # fmt: skip
        return out

    def _refuses(self, what: str, cache: KVCache, head_dim: int = 0) -> bool:
        """Say once why the kernels cannot use these caches, or with `head_dim` attend over them; whether it is so."""
        reason = unsupported(*cache)
        most = self.options.most_head_dim if cache.key.element_size() == 2 else 256
        if cache.key.dtype == FP8 and not self.options.float8:
            reason = "this device does not convert e4m3, the dtype of the KV caches"
        elif head_dim > most or head_dim % 2:
            reason = f"head_dim is {head_dim}, the attention kernel takes even numbers up to {most}"
        if reason is not None:
            self.say_once(f"{what} runs on plain torch ops, slower: {reason}")
        return reason is not None


def unsupported(key_cache: Tensor, value_cache: Tensor) -> str | None:
    """Return why the kernels cannot use these caches; None if they can.

    They take any strides that key and value share if heads are contiguous. So they take the two halves of one tensor
    [num_blocks, num_kv_heads, block_size, 2 * head_dim], each transposed to the shape of a cache.
    """
    if key_cache.shape != value_cache.shape:
        return f"the key cache is {list(key_cache.shape)}, the value cache {list(value_cache.shape)}"
    if key_cache.stride() != value_cache.stride():
        return f"the key cache has strides {key_cache.stride()}, the value cache {value_cache.stride()}"
    if key_cache.stride(3) != 1:
        return f"the last stride of the KV caches is {key_cache.stride(3)}, the kernels take 1"
    return None


def cache_layout(cache: Tensor) -> dict[str, int]:
    """Strides of the KV caches as constants of a kernel."""
    return {
        "BLOCK": cache.shape[1],
        "BLOCK_STRIDE": cache.stride(0),
        "KEY_STRIDE": cache.stride(1),
        "HEAD_STRIDE": cache.stride(2),
    }


def _heads(x: Tensor) -> Tensor:
    """x [T, heads, dim], copied unless the heads of each row are contiguous, as in a view of a packed projection."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()

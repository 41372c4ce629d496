"""Launching the Triton kernels of paged attention and cache writes."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.ops.linear_fp8 import FP8
from specgraph.ops.triton import attention, rows
from specgraph.ops.triton.launch import AttentionShape, Launcher, ceil_div, power_of_two

MOST_LISTED = 32
"""Requests whose splits start in the order of their keys. Each program compares the lengths of all with each other."""


@dataclass(frozen=True, slots=True)
class AttentionOps(Launcher):
    """Implementations of the ops in `specgraph.ops.kv_cache` and `specgraph.ops.paged_attention`."""

    def rotate_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Tensor | None, positions: Tensor,
        slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.rotate_and_store`."""
        query, key, value = _heads(query), _heads(key), _heads(value)
        count, heads, dim = query.shape
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        total = heads + 2 * key.shape[1]
        per_program = 16
        if reason := self.unsupported(dim, key_cache, value_cache, rotated_only=True):
            self.say_once(f"rotate_and_store runs on plain torch ops, slower: {reason}")
            return ops.rotate_and_store.reference(
                query, key, value, rotary, positions, slot_mapping, key_cache, value_cache
            )
        if count:
            rows.rotate_and_store_kernel[(count, ceil_div(total, per_program))](
                query, key, value, rotary, positions.contiguous(), slot_mapping.contiguous(), out, key_cache,
                value_cache, query.stride(0), key.stride(0), value.stride(0),
                0 if rotary is None else rotary.stride(0), heads, key.shape[1], **cache_layout(key_cache), DIM=dim,
                DIMS=power_of_two(dim), HALF=0 if rotary is None else rotary.shape[1] // 2,
                HEADS=per_program, ROTATED=rotary is not None, num_warps=4, **self.common(),
            )  # fmt: skip
        return out

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, *, query_len: int, scale: float, causal: bool = True,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.paged_attention`."""
        if self._refuses("attention", query, key_cache, value_cache):
            return ops.paged_attention.reference(
                query, key_cache, value_cache, block_table, seq_lens, query_start_loc, query_len=query_len,
                scale=scale, causal=causal,
            )  # fmt: skip
        return self._attend(
            query, None, None, None, None, None, key_cache, value_cache, block_table, seq_lens, query_start_loc,
            query_len, scale, causal,
        )  # fmt: skip

    def tree_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        ancestors: Tensor, *, tree_len: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.tree_attention`."""
        if self._refuses("tree_attention", query, key_cache, value_cache):
            return ops.tree_attention.reference(
                query, key_cache, value_cache, block_table, seq_lens, ancestors, tree_len=tree_len, scale=scale
            )
        rows = query.shape[0] // max(seq_lens.shape[0], 1)
        return self._attend(
            query, None, None, None, None, None, key_cache, value_cache, block_table, seq_lens, None, rows, scale,
            causal=False, ancestors=ancestors.contiguous(), tree_len=tree_len,
        )  # fmt: skip

    def rotate_store_attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Tensor | None, positions: Tensor,
        slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, *, query_len: int, scale: float, causal: bool = True,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.ops.rotate_store_attend`: one kernel when every request has one row."""
        single = query_len == 1 and query.shape[0] == seq_lens.shape[0]
        fits = single and (rotary is None or rotary.shape[1] == query.shape[2])
        if fits and not self._refuses("attention", query, key_cache, value_cache):
            return self._attend(
                query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
                query_start_loc, query_len, scale, causal,
            )  # fmt: skip
        return ops.rotate_store_attend.reference(
            query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
            query_start_loc, query_len=query_len, scale=scale, causal=causal,
        )  # fmt: skip

    def _attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, rotary: Tensor | None,
        positions: Tensor | None, slot_mapping: Tensor | None, key_cache: Tensor, value_cache: Tensor,
        block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None, query_len: int, scale: float,
        causal: bool, ancestors: Tensor | None = None, tree_len: int = 0,
    ) -> Tensor:  # fmt: skip
        """query_start_loc: None where every request has `query_len` rows."""
        query = _heads(query)
        count, heads, dim = query.shape
        kv_heads = key_cache.shape[2]
        requests, group = seq_lens.shape[0], heads // kv_heads
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        if count == 0:
            return out
        wide = query.dtype == torch.float32
        tile = self.options.attention(
            AttentionShape(
                rows=query_len * group, pairs=requests * kv_heads, context=block_table.shape[1] * key_cache.shape[1],
                head_dim=dim, itemsize=query.element_size(),
                cache_itemsize=key_cache.element_size(), compute_units=self.options.compute_units,
            )
        )  # fmt: skip
        splits, tiles = tile.splits, ceil_div(query_len * group, tile.rows)
        span = tile.span if splits > 1 else 0
        if splits > 1:
            shape = (count * heads, splits)
            partial = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
            top = torch.empty(shape, dtype=torch.float32, device=query.device)
            total = torch.empty(shape, dtype=torch.float32, device=query.device)
        else:
            partial = top = total = None
        if key is not None and value is not None:
            key, value = _heads(key), _heads(value)
            if key.stride(0) != value.stride(0):
                key, value = key.contiguous(), value.contiguous()
        attention.attend_kernel[(kv_heads, splits, requests * tiles)](
            query, key, value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
            query_start_loc, ancestors, out, partial, top, total, query.stride(0),
            0 if key is None else key.stride(0), 0 if rotary is None else rotary.stride(0), block_table.stride(0),
            block_table.shape[1], heads, scale, tree_len, requests,
            GROUP=group, HALF=dim // 2, HALVES=power_of_two(max(dim // 2, 16)), **cache_layout(key_cache),
            ROWS=tile.rows, KEYS=tile.keys, SPLITS=splits, SPAN=span,
            TILES=tiles, CAUSAL=causal, FUSED=key is not None, ROTATED=rotary is not None,
            PRECISION="ieee" if wide else "tf32", UNIFORM=query_len if query_start_loc is None else 0,
            REQUESTS=power_of_two(requests) if span and requests <= MOST_LISTED else 0,
            num_warps=tile.warps, num_stages=tile.stages, **self.common(),
        )  # fmt: skip
        if splits > 1:
            items = 4 if splits <= 16 else 1
            attention.combine_kernel[(ceil_div(count * heads, items),)](
                partial, top, total, out, count * heads, DIM=dim, DIMS=power_of_two(dim), SPLITS=splits, SPAN=span,
                ITEMS=items, num_warps=4, **self.common(),
            )  # fmt: skip
        return out

    def _refuses(self, what: str, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
        """Whether the kernels cannot use these caches; it is said once."""
        reason = self.unsupported(query.shape[2], key_cache, value_cache)
        if reason is not None:
            self.say_once(f"{what} runs on plain torch ops, many times slower: {reason}")
        return reason is not None

    def unsupported(self, dim: int, key_cache: Tensor, value_cache: Tensor, rotated_only: bool = False) -> str | None:
        """Why the kernels cannot use these caches on this device; None if they can."""
        if key_cache.dtype == FP8 and not self.options.float8:
            return "this device does not convert e4m3, the dtype of the KV caches"
        return unsupported(dim, key_cache, value_cache, rotated_only)


def unsupported(dim: int, key_cache: Tensor, value_cache: Tensor, rotated_only: bool = False) -> str | None:
    """Why the kernels cannot use these caches; None if they can.

    They take any strides that key and value share if heads are contiguous. So they take the two halves of one tensor
    [num_blocks, num_kv_heads, block_size, 2 * head_dim], each transposed to the shape of a cache.
    """
    if not rotated_only and (dim > 256 or dim % 2):
        return f"head_dim is {dim}, the attention kernel takes even numbers up to 256"
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

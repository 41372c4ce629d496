"""The kernel that writes KV caches: `rotate_and_store`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, power_of_two
from specgraph.ops import KVCache, NewRows
from specgraph.ops.linear import FP8


@triton.jit
def rotate_and_store_kernel(
    query, key, value, rotary, positions, slot_mapping, rotated, key_cache, value_cache, query_stride, key_stride,
    value_stride, rotary_stride, heads, kv_heads,
    BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per row and HEADS heads. Heads are counted over query, then key, then value."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    slot = tl.load(slot_mapping + row)
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    inside = dim < DIM
    q_at = query + row * query_stride + head * DIM
    k_at = key + row * key_stride + (head - heads) * DIM
    q = tl.load(q_at + dim, mask=is_query & inside, other=0.0)
    k = tl.load(k_at + dim, mask=is_key & inside, other=0.0)
    if rotary is not None:
        # The paired element in the other half. Its sine is negative for the first half.
        turned = dim < 2 * HALF
        first = dim < HALF
        other = tl.where(first, dim + HALF, dim - HALF)
        angle = rotary + tl.load(positions + row) * rotary_stride + tl.where(first, dim, dim - HALF)
        cos = tl.load(angle, mask=turned, other=1.0)
        sin = tl.load(angle + HALF, mask=turned, other=0.0) * tl.where(first, -1.0, 1.0)
        q_other = tl.load(q_at + other, mask=is_query & turned, other=0.0).to(tl.float32)
        k_other = tl.load(k_at + other, mask=is_key & turned, other=0.0).to(tl.float32)
        q = (q.to(tl.float32) * cos + q_other * sin).to(q.dtype)
        k = (k.to(tl.float32) * cos + k_other * sin).to(k.dtype)
    tl.store(rotated + (row * heads + head) * DIM + dim, q, mask=is_query & inside)
    if slot >= 0:
        row_at = slot // BLOCK * BLOCK_STRIDE + slot % BLOCK * KEY_STRIDE
        at = row_at + (head - heads) * HEAD_STRIDE + dim
        tl.store(key_cache + at, k.to(key_cache.dtype.element_ty), mask=is_key & inside)
        v_at = value + row * value_stride + (head - heads - kv_heads) * DIM
        v = tl.load(v_at + dim, mask=is_value & inside, other=0.0)
        tl.store(value_cache + at - kv_heads * HEAD_STRIDE, v.to(value_cache.dtype.element_ty), mask=is_value & inside)


class KVCacheOps(Launcher):
    """The implementation of `specgraph.ops.rotate_and_store`."""

    __slots__ = ()

    def rotate_and_store(self, query: Tensor, new: NewRows, cache: KVCache) -> Tensor:
        if self._refuses("rotate_and_store", cache):
            return NotImplemented
        key, value, rotary, positions, slots = new
        query, key, value = with_packed_heads(query), with_packed_heads(key), with_packed_heads(value)
        count, heads, dim = query.shape
        out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
        total = heads + 2 * key.shape[1]
        per_program = 16
        if count:
            self.launch(
                rotate_and_store_kernel, (count, ceil_div(total, per_program)),
                query, key, value, rotary, positions.contiguous(), slots.contiguous(), out, cache.key, cache.value,
                query.stride(0), key.stride(0), value.stride(0), 0 if rotary is None else rotary.stride(0), heads,
                key.shape[1], **cache_layout(cache.key), DIM=dim, DIMS=power_of_two(dim),
                HALF=0 if rotary is None else rotary.shape[1] // 2, HEADS=per_program, num_warps=4,
            )  # fmt: skip
        return out

    def _refuses(self, what: str, cache: KVCache, head_dim: int = 0) -> bool:
        """Return whether the kernels can't use these caches, or with `head_dim` can't attend over them.

        The reason is logged once.
        """
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
    """Return why the kernels cannot use these caches. None if they can.

    Keys and values must have the same strides, and each head must be contiguous. So the two halves of one tensor
    [num_blocks, num_kv_heads, block_size, 2 * head_dim] will do, each transposed to the shape of a cache.
    """
    if key_cache.shape != value_cache.shape:
        return f"the key cache is {list(key_cache.shape)}, the value cache {list(value_cache.shape)}"
    if key_cache.stride() != value_cache.stride():
        return f"the key cache has strides {key_cache.stride()}, the value cache {value_cache.stride()}"
    if key_cache.stride(3) != 1:
        return f"the last stride of the KV caches is {key_cache.stride(3)}, the kernels take 1"
    return None


def cache_layout(cache: Tensor) -> dict[str, int]:
    """Return the strides of the KV caches as constants of a kernel."""
    return {
        "BLOCK": cache.shape[1],
        "BLOCK_STRIDE": cache.stride(0),
        "KEY_STRIDE": cache.stride(1),
        "HEAD_STRIDE": cache.stride(2),
    }


def with_packed_heads(x: Tensor) -> Tensor:
    """Return x [T, heads, dim] with contiguous heads in each row. A view of a packed projection is not copied."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()

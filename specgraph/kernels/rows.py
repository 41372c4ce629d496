# type: ignore  (what Triton compiles is not what a type checker reads)
"""Small kernels over rows and rounds: rotation and cache writes, and copies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_store_kernel(
    query, key, value, rotary, positions, slot_mapping, rotated, key_cache, value_cache, query_stride, key_stride,
    value_stride, rotary_stride, heads, kv_heads,
    BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of one row. Heads are counted over query, then key, then value."""
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
        # The other half's element with the sign that its sine takes.
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


@triton.jit
def take_rows_kernel(source, chosen, out, size, source_stride, out_stride, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """out[i] = source[chosen[i]], one program per row."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    at = row
    if chosen is not None:
        at = tl.load(chosen + row)
    column = tl.arange(0, WIDTH)
    value = tl.load(source + at * source_stride + column, mask=column < size)
    tl.store(out + row * out_stride + column, value, mask=column < size)


@triton.jit(do_not_specialize=["n", "query_len", "width", "to_width", "aux_elements", "table_stride"])
def load_round_kernel(
    sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids, to_num_sampled,
    to_start_positions, to_aux_hidden, to_block_table, n, query_len, width, to_width, aux_elements, table_stride,
    ROW: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request and part: part 0 takes the small tensors, the others CHUNK elements of aux_hidden."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    part = tl.program_id(1)
    live = request < n
    if part == 0:
        count = tl.load(num_sampled + request, mask=live, other=0)
        tl.store(to_num_sampled + request, count)
        if live:
            tl.store(to_start_positions + request, tl.load(start_positions + request))
            offset = tl.arange(0, ROW)
            token = tl.load(sampled_token_ids + request * query_len + offset, mask=offset < query_len, other=0)
            tl.store(to_sampled_token_ids + request * query_len + offset, token, mask=offset < query_len)
            column = tl.arange(0, TABLE)
            block = tl.load(block_table + request * table_stride + column, mask=column < width, other=0)
            tl.store(to_block_table + request * to_width + column, block, mask=column < to_width)
    elif live:
        at = (part - 1) * CHUNK + tl.arange(0, CHUNK)
        inside = at < aux_elements
        at += request.to(tl.int64) * aux_elements
        tl.store(to_aux_hidden + at, tl.load(aux_hidden + at, mask=inside), mask=inside)

"""Paged attention. The work follows the lengths on the device; the grid depends on shapes only.

Every request has the same number of splits at any length, so that a launch never depends on a length. Each split covers
an equal part of the actual context, and has a least size: a context shorter than two of these is not cut. A second
kernel adds the parts in order. A result depends on the request's own length and on shapes, not on other requests.

If RANKS ranks share the keys of each request, rank `rank` attends to the keys that it holds, at positions rank,
rank + RANKS, ... A row of the output is then one element wider, and ends in the log-sum-exp of its scores.

Each vector of head_dim elements is in registers as two halves, `left` and `right`, which rotation pairs.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph import ops
from specgraph.kernels.attention_parts import AttentionPartOps, Partial, first_of, store_sums
from specgraph.kernels.kv_cache import cache_layout, with_packed_heads
from specgraph.kernels.launch import AttentionShape, ceil_div, power_of_two
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows

MOST_LISTED = 32
"""Up to this number of requests, splits start in the order of their lengths. Each program then compares all lengths."""


@triton.jit
def load_halves(at, mask, HALF: tl.constexpr):
    """Load both halves of vectors. The first halves are at `at`."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def store_halves(at, left, right, mask, HALF: tl.constexpr):
    """Store both halves of vectors in the dtype of the memory. The first halves go to `at`."""
    tl.store(at, left, mask=mask)
    tl.store(at + HALF, right, mask=mask)


@triton.jit
def turn(left, right, cos, sin):
    """Rotate vectors, in float32."""
    x = left.to(tl.float32)
    y = right.to(tl.float32)
    return (x * cos - y * sin).to(left.dtype), (y * cos + x * sin).to(right.dtype)


@triton.jit
def keys_of(rank, keys, RANKS: tl.constexpr):
    """Return how many of the first `keys` keys of a request a rank holds."""
    if RANKS > 1:
        keys = (keys + (RANKS - 1 - rank)) // RANKS
    return keys


@triton.jit
def listed_split(
    seq_lens, n, requests, rank, REQUESTS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, RANKS: tl.constexpr
):
    """Return the request and the split of number n among all splits with keys, and the number of splits of its request.

    The longest splits come first. The request is -1 if there are no more than n splits. REQUESTS is the power of two
    that holds `requests`.
    """
    of = tl.arange(0, REQUESTS)
    length = keys_of(rank, tl.load(seq_lens + of, mask=of < requests, other=0), RANKS)
    pieces = tl.where(of < requests, tl.minimum(tl.maximum(length // SPAN, 1), SPLITS), 0)
    order = length // tl.maximum(pieces, 1) * REQUESTS - of
    start = tl.sum(tl.where(order[None, :] > order[:, None], pieces[None, :], 0), axis=1)
    chosen = (start <= n) & (n < start + pieces)
    request = tl.sum(tl.where(chosen, of + 1, 0), axis=0) - 1
    split = tl.sum(tl.where(chosen, n - start, 0), axis=0)
    return request, split, tl.sum(tl.where(chosen, pieces, 0), axis=0)


@triton.jit
def attend_keys(
    q_left, q_right, keys_left, keys_right, values_left, values_right, seen, top, total, left, right, scale,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to each row's softmax: to its largest score, its sum of weights and its sum of values."""
    scores = tl.dot(q_left, tl.trans(keys_left.to(q_left.dtype)), input_precision=PRECISION)
    scores = tl.dot(q_right, tl.trans(keys_right.to(q_left.dtype)), scores, input_precision=PRECISION)
    scores = tl.where(seen, scores * (scale * 1.4426950408889634), float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(q_left.dtype)
    left = tl.dot(weights, values_left.to(q_left.dtype), left * shrink[:, None], input_precision=PRECISION)
    right = tl.dot(weights, values_right.to(q_left.dtype), right * shrink[:, None], input_precision=PRECISION)
    return new_top, total, left, right


@triton.jit
def store_rows(
    out, place, left, right, top, total, live, HALF: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr
):
    """Divide sums of values [N, HALVES] by the sums of weights. Store them at `place`, a number per row and head."""
    share = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    at = out + place[:, None] * WIDTH + tl.arange(0, HALVES)[None, :]
    wanted = first_of(live[:, None], HALF, HALVES)
    tl.store(at, left * share, mask=wanted)
    tl.store(at + HALF, right * share, mask=wanted)
    store_sums(out, place, top, total, live, 2 * HALF, WIDTH)


@triton.jit
def attend_kernel(
    query, new_key, new_value, rotary, positions, slot_mapping, key_cache, value_cache, block_table, seq_lens,
    query_start_loc, ancestors, out, partial_out, partial_max, partial_sum, query_stride, new_stride, rotary_stride,
    table_stride, table_width, heads, scale, tree_len, requests, rank,
    GROUP: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, SPAN: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    UNIFORM: tl.constexpr, REQUESTS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of one request's rows, for the query heads of one KV head, over one split of the context.

    HALF is half of head_dim, and HALVES is the power of two from 16 on that holds it. With `new_key` every request has
    one row, and the query comes unrotated. The first split rotates, stores and attends to the row's own key and value
    without reading them from the cache. With `ancestors`, a row sees key i of the last `tree_len` keys if its bit i is
    set. UNIFORM is the number of rows of every request; if it is 0, `query_start_loc` gives the rows.

    With SPAN, a context is cut into the largest number of equal splits that have SPAN keys each. A context of less than
    2 * SPAN keys is not cut: its first split writes to `out` at once, and -1 to `partial_sum`. The other splits do
    nothing.

    With REQUESTS and SPAN, a program's number is not its split's number: splits with keys come first, the longest
    before the others, so that programs without keys start last. The parts and their order are the same.
    """
    if OVERLAP is not None:
        OVERLAP()
    # Prologue: the rows, the split and the keys of this program, its queries, and the new keys that it stores.
    DIM: tl.constexpr = 2 * HALF
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2) // TILES
    tile = tl.program_id(2) % TILES
    listed = SPLITS
    if REQUESTS:
        request, split, listed = listed_split(
            seq_lens, request * SPLITS + split, requests, rank, REQUESTS, SPLITS, SPAN, RANKS
        )
        if request < 0:
            return
    if UNIFORM:
        begin = request * UNIFORM
        count = UNIFORM
    else:
        begin = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - begin
    seq_len = tl.load(seq_lens + request)
    item = tile * ROWS + tl.arange(0, ROWS)
    row = item // GROUP
    head = kv_head * GROUP + item % GROUP
    live = row < count
    if tile * ROWS >= count * GROUP:
        return
    visible = tl.zeros((ROWS,), tl.int32) + seq_len
    if CAUSAL:
        visible = seq_len - count + 1 + row
    if ancestors is not None:
        bits = tl.load(ancestors + begin + row, mask=live, other=0)
    visible = tl.where(live & (seq_len > 0), tl.minimum(visible, table_width * BLOCK * RANKS), 0)
    visible = keys_of(rank, visible, RANKS)
    fresh = False
    if new_key is not None:
        slot = tl.load(slot_mapping + begin)
        fresh = (slot >= 0) & (seq_len > 0)
        if fresh:
            visible = tl.where(visible > 0, visible - 1, 0)
    stop = tl.max(visible, axis=0)
    pieces = SPLITS
    if SPAN:
        pieces = tl.minimum(tl.maximum(stop // SPAN, 1), SPLITS)
    span = tl.cdiv(tl.cdiv(stop, pieces), KEYS) * KEYS
    first = split * span
    last = tl.minimum(first + span, stop)
    place = (begin + row).to(tl.int64) * heads + head
    whole = False
    if SPAN:
        whole = stop <= span
        if (split > 0) & (first >= stop):
            if not whole:
                empty = tl.full((ROWS,), float("-inf"), tl.float32)
                tl.store(partial_max + place * SPLITS + split, empty, mask=live)
            return
        if REQUESTS and (split == 0) & (not whole):
            other = tl.arange(0, SPLITS)[None, :]
            absent = live[:, None] & (other >= listed)
            at = partial_max + place[:, None] * SPLITS + other
            tl.store(at, tl.full((ROWS, SPLITS), float("-inf"), tl.float32), mask=absent)

    half = tl.arange(0, HALVES)
    known = half < HALF
    wanted = first_of(live[:, None], HALF, HALVES)
    q_at = query + (begin + row).to(tl.int64)[:, None] * query_stride + head[:, None] * DIM + half[None, :]
    q_left, q_right = load_halves(q_at, wanted, HALF)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    left = tl.zeros((ROWS, HALVES), tl.float32)
    right = tl.zeros((ROWS, HALVES), tl.float32)
    if new_key is not None:
        if rotary is not None:
            angle = rotary + tl.load(positions + begin) * rotary_stride + half
            cos, sin = load_halves(angle, known, HALF)
            q_left, q_right = turn(q_left, q_right, cos[None, :], sin[None, :])
        if fresh & (split == 0):
            new = new_key + begin.to(tl.int64) * new_stride + kv_head * DIM + half
            k_left, k_right = load_halves(new, known, HALF)
            if rotary is not None:
                k_left, k_right = turn(k_left, k_right, cos, sin)
            new = new_value + begin.to(tl.int64) * new_stride + kv_head * DIM + half
            v_left, v_right = load_halves(new, known, HALF)
            to = slot // BLOCK * BLOCK_STRIDE + slot % BLOCK * KEY_STRIDE + kv_head * HEAD_STRIDE + half
            k_left = k_left.to(key_cache.dtype.element_ty)
            k_right = k_right.to(key_cache.dtype.element_ty)
            store_halves(key_cache + to, k_left, k_right, known, HALF)
            v_left = v_left.to(value_cache.dtype.element_ty)
            v_right = v_right.to(value_cache.dtype.element_ty)
            store_halves(value_cache + to, v_left, v_right, known, HALF)
            own = tl.sum(q_left.to(tl.float32) * k_left.to(tl.float32)[None, :], axis=1)
            own += tl.sum(q_right.to(tl.float32) * k_right.to(tl.float32)[None, :], axis=1)
            top = tl.where(live, own * (scale * 1.4426950408889634), float("-inf"))
            total = tl.where(live, 1.0, 0.0)
            left += v_left.to(tl.float32)[None, :]
            right += v_right.to(tl.float32)[None, :]

    # Loop: the keys of the cache, a block of KEYS after the other.
    key = tl.arange(0, KEYS)
    for n in range(first, last, KEYS):
        position = n + key
        inside = position < last
        block = tl.load(block_table + request * table_stride + position // BLOCK, mask=inside, other=0).to(tl.int64)
        cell = block * BLOCK_STRIDE + position % BLOCK * KEY_STRIDE + kv_head * HEAD_STRIDE
        cell = cell[:, None] + half[None, :]
        loaded = first_of(inside[:, None], HALF, HALVES)
        keys_left, keys_right = load_halves(key_cache + cell, loaded, HALF)
        seen = inside[None, :] & (position[None, :] < visible[:, None])
        if ancestors is not None:
            in_tree = position * RANKS + rank - (seq_len - tree_len)
            bit = (bits[:, None] >> tl.minimum(tl.maximum(in_tree, 0), 63).to(tl.int64)[None, :]) & 1
            seen = seen & ((in_tree < 0)[None, :] | (bit > 0))
            loaded = loaded & (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None]  # values that no row sees may be NaN
        values_left, values_right = load_halves(value_cache + cell, loaded, HALF)
        top, total, left, right = attend_keys(
            q_left, q_right, keys_left, keys_right, values_left, values_right, seen, top, total, left, right, scale,
            PRECISION,
        )  # fmt: skip

    # Epilogue: the output if this split is the whole context. Otherwise one part of it.
    if SPLITS == 1:
        store_rows(out, place, left, right, top, total, live, HALF, HALVES, WIDTH)
    elif whole:
        store_rows(out, place, left, right, top, total, live, HALF, HALVES, WIDTH)
        tl.store(partial_sum + place * SPLITS, tl.full((ROWS,), -1.0, tl.float32), mask=live)
    else:
        place = place * SPLITS + split
        tl.store(partial_max + place, top, mask=live)
        tl.store(partial_sum + place, total, mask=live)
        store_halves(partial_out + place[:, None] * DIM + half[None, :], left, right, wanted, HALF)


class AttentionOps(AttentionPartOps):
    """Implementations of `specgraph.ops.paged_attention` and `specgraph.ops.attend_part`."""

    __slots__ = ()

    def paged_attention(
        self, query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask,
        new: NewRows | None = None, *, scale: float,
    ) -> Tensor:  # fmt: skip
        """Implement `specgraph.ops.paged_attention` without windows and sinks.

        The same kernel stores `new` if every request has one row, no row is in a tree, and rotation covers whole heads.
        """
        if mask.has_window_or_sinks or self._refuses("attention", cache, query.shape[2]):
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
        """Implement `specgraph.ops.attend_part` without windows and sinks."""
        if mask.has_window_or_sinks or self._refuses("attention over a rank's keys", cache, query.shape[2]):
            return NotImplemented
        rows, heads, dim = query.shape
        out = torch.empty((rows, heads, dim + 1), dtype=torch.float32, device=query.device)
        return self._attend(query, cache, block_table, lengths, mask, None, scale, out, rank, ranks)

    def _attend(
        self, query: Tensor, cache: KVCache, block_table: Tensor, lengths: DeviceLengths, mask: Mask,
        new: NewRows | None, scale: float, out: Tensor, rank: int = 0, ranks: int = 1,
    ) -> Tensor:  # fmt: skip
        """Attend to the keys of one rank, into `out`. If its rows are one element wider, the log-sum-exp goes there."""
        count, heads, dim = query.shape
        seq_lens, starts, query_len = lengths
        requests, kv_heads = seq_lens.shape[0], cache.key.shape[2]
        query = with_packed_heads(query)
        if count == 0:
            return out
        key = value = rotary = positions = slots = ancestors = None
        if new is not None:
            key, value, rotary, positions, slots = new
            key, value = with_packed_heads(key), with_packed_heads(value)
            if key.stride(0) != value.stride(0):
                key, value = key.contiguous(), value.contiguous()
        if mask.ancestors is not None:  # every request has the same number of rows
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

        def floats(*last: int) -> Tensor:
            return query.new_empty((count * heads, splits, *last), dtype=torch.float32)

        partial = Partial(floats(dim), floats(), floats()) if splits > 1 else None
        self.launch(
            attend_kernel, (kv_heads, splits, requests * tiles),
            query, key, value, rotary, positions, slots, *cache, block_table, seq_lens, starts, ancestors, out,
            *(partial or (None, None, None)), query.stride(0), 0 if key is None else key.stride(0),
            0 if rotary is None else rotary.stride(0), block_table.stride(0), block_table.shape[1], heads, scale,
            mask.tree_len, requests, rank, GROUP=group, HALF=dim // 2, HALVES=power_of_two(max(dim // 2, 16)),
            **cache_layout(cache.key), ROWS=tile.rows, KEYS=tile.keys, SPLITS=splits, SPAN=span, TILES=tiles,
            CAUSAL=mask.causal,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", UNIFORM=query_len if starts is None else 0,
            REQUESTS=power_of_two(requests) if span and requests <= MOST_LISTED else 0, RANKS=ranks,
            WIDTH=out.shape[2],
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if partial is not None:
            self._combine(partial, out, span)
        return out

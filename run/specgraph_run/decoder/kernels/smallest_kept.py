# type: ignore  (Triton compiles it; no type checker can read it)
"""The smallest weight that a row keeps: `bracket` finds two cuts around it, and `select_kernel` finds the weight.

`select_kernel` is pass 4 of `sampling_parameters.py`. It searches the weights between the two cuts. The
number and the sum of the weights that are at least w fall as w rises, so it bisects over the bits of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL = tl.constexpr(2147483647)


@triton.jit
def octaves_of(cut):
    """Return how many powers of two a cut lies below the largest weight. The last cut, 7, lies below all weights."""
    return tl.where(cut < 6, 2 * cut + 3, tl.where(cut == 6, 16, 40))


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, request):
    """Return whether a request's parameters may exclude tokens."""
    any_filter = (tl.load(top_k + request) > 0) | (tl.load(top_p + request) < 1) | (tl.load(min_p + request) > 0)
    return (tl.load(temperature + request) > 0) & any_filter


@triton.jit
def least_weight(min_p, request):
    """Return the smallest weight that min_p keeps, float32."""
    return tl.maximum(tl.load(min_p + request) * 1099511627776.0, 1.0)


@triton.jit
def first_reaching(cumulated, wanted):
    """Return the first cut with a cumulated number of at least `wanted`."""
    return tl.sum((cumulated < wanted).to(tl.int32), axis=0)


@triton.jit
def at_cut(cumulated, cut, CUTS: tl.constexpr):
    """Return cumulated[cut], or 0 for cut -1."""
    return tl.sum(tl.where(tl.arange(0, CUTS) == cut, cumulated, 0), axis=0)


@triton.jit
def nucleus(total, top_p, request):
    """Return top_p times a total weight, rounded up."""
    share = (tl.load(top_p + request) * 16777216.0).to(tl.int64)
    reached = share * (total >> 24) + ((share * (total & 16777215) + 16777215) >> 24)
    return tl.maximum(reached, 1)


@triton.jit
def bracket(counts, sums, top_k, top_p, row, request, blocks, CUTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Find the first and the last cut that the end of the kept tokens may lie at.

    If first > last, both top_k and top_p keep all tokens.

    Returns:
        first, last, whether top_k cuts, whether top_p cuts, the number and the weight of the tokens within cut
        first - 1, and the weight of all tokens.
    """
    block = tl.arange(0, BLOCKS)[:, None]
    cut = tl.arange(0, CUTS)[None, :]
    at = (row * blocks + block) * CUTS + cut
    most = tl.load(top_k + request)
    first = tl.full((), CUTS, tl.int32)
    last = tl.full((), -1, tl.int32)
    by_number = most > 0
    by_weight = tl.load(top_p + request) < 1
    number = tl.zeros((CUTS,), tl.int32)
    weight = tl.zeros((CUTS,), tl.int64)
    if by_number:
        number = tl.sum(tl.load(counts + at, mask=(block < blocks) & (cut < CUTS), other=0), axis=0)
        by_number = at_cut(number, CUTS - 1, CUTS) > most
    if by_weight:
        weight = tl.sum(tl.load(sums + at, mask=(block < blocks) & (cut < CUTS), other=0), axis=0)
    total = at_cut(weight, CUTS - 1, CUTS)
    by_weight = by_weight & (total > 0)
    fewest = total
    if by_number:
        last = first_reaching(number, most)
        first = last
        fewest = at_cut(weight, last - 1, CUTS)
    if by_weight:
        first = tl.minimum(first, first_reaching(weight, nucleus(fewest, top_p, request)))
        if last < 0:
            last = first
    return first, last, by_number, by_weight, at_cut(number, first - 1, CUTS), at_cut(weight, first - 1, CUTS), total


@triton.jit
def collected(found, held, row, blocks, begin, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the bits of CHUNK collected weights of each block, from number `begin` on, then 0: [BLOCKS, CHUNK]."""
    block = tl.arange(0, BLOCKS)
    there = tl.load(held + row * blocks + block, mask=block < blocks, other=0)
    place = begin + tl.arange(0, CHUNK)[None, :]
    start = found + (row.to(tl.int64) * blocks + block)[:, None] * COLUMNS
    return tl.load(start + place, mask=place < there[:, None], other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def worth(bits, least_bits, WEIGHED: tl.constexpr):
    """Return 1, or with WEIGHED the weight, for each weight of at least `least_bits`, and 0 for the others: int64."""
    value = bits.to(tl.float32, bitcast=True).to(tl.int64) if WEIGHED else 1
    return tl.where(bits >= least_bits, value, 0).to(tl.int64)


@triton.jit
def tally(found, held, row, blocks, most, least_bits, WEIGHED: tl.constexpr,
          BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return the number, or with WEIGHED the sum, of the collected weights of at least `least_bits`: int64 [BLOCKS]."""
    number = tl.zeros((BLOCKS,), tl.int64)
    for begin in range(0, most, CHUNK):
        bits = collected(found, held, row, blocks, begin, BLOCKS, COLUMNS, CHUNK)
        number += tl.sum(worth(bits, least_bits, WEIGHED), axis=1)
    return number


@triton.jit
def largest_reaching(found, held, row, blocks, most, low, high, before, wanted, WEIGHED: tl.constexpr,
                     BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return the largest bits b such that `before` plus the collected weights of at least b reaches `wanted`.

    The weights are counted, or with WEIGHED summed. `low` must reach `wanted`, and `high` must not. The first CHUNK
    weights of each block stay in registers; few rows have more.
    """
    bits = collected(found, held, row, blocks, 0, BLOCKS, COLUMNS, CHUNK)
    while high - low > 1:
        middle = low + (high - low) // 2
        number = tl.sum(worth(bits, middle, WEIGHED), axis=1)
        for begin in range(CHUNK, most, CHUNK):
            more = collected(found, held, row, blocks, begin, BLOCKS, COLUMNS, CHUNK)
            number += tl.sum(worth(more, middle, WEIGHED), axis=1)
        enough = before + tl.sum(number, axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def select_kernel(
    temperature, top_k, top_p, min_p, counts, sums, found, held, cuts, ties, per_request, blocks,
    CUTS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the smallest kept weight, one program per row, and write its bits to `cuts`.

    `ties` [rows, blocks] gets the number of tokens with exactly this weight to keep in each block. ALL keeps all.
    """
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0)
    request = row // per_request
    if not is_filtered(temperature, top_k, top_p, min_p, request):
        return
    first, last, by_number, by_weight, number, weight, total = bracket(
        counts, sums, top_k, top_p, row, request, blocks, CUTS, BLOCKS
    )
    block = tl.arange(0, BLOCKS)
    cut = least_weight(min_p, request).to(tl.int32, bitcast=True)
    left = tl.full((BLOCKS,), ALL, tl.int32)
    kept = tl.full((), 0, tl.int64)
    if by_number | by_weight:
        most = tl.max(tl.load(held + row * blocks + block, mask=block < blocks, other=0), axis=0)
        # A weight that is n powers of two below the largest has the exponent 40 - n.
        low = (127 + 40 - octaves_of(last)) << 23
        high = (127 + 40 - tl.where(first > 0, octaves_of(first - 1), -1)) << 23
        if by_number:
            fewest = tl.load(top_k + request)
            cut = largest_reaching(
                found, held, row, blocks, most, low, high, number.to(tl.int64), fewest, False, BLOCKS, COLUMNS, CHUNK
            )
            more = tl.sum(tally(found, held, row, blocks, most, cut + 1, False, BLOCKS, COLUMNS, CHUNK), axis=0)
            kept = fewest - number - more
            if by_weight:
                more = tl.sum(tally(found, held, row, blocks, most, cut + 1, True, BLOCKS, COLUMNS, CHUNK), axis=0)
                total = weight + more + kept * cut.to(tl.float32, bitcast=True).to(tl.int64)
        if by_weight:
            wanted = nucleus(total, top_p, request)
            cut = largest_reaching(
                found, held, row, blocks, most, low, high, weight, wanted, True, BLOCKS, COLUMNS, CHUNK
            )
            more = tl.sum(tally(found, held, row, blocks, most, cut + 1, True, BLOCKS, COLUMNS, CHUNK), axis=0)
            value = cut.to(tl.float32, bitcast=True).to(tl.int64)
            kept = (wanted - weight - more + value - 1) // value
        equal = tally(found, held, row, blocks, most, cut, False, BLOCKS, COLUMNS, CHUNK)
        equal -= tally(found, held, row, blocks, most, cut + 1, False, BLOCKS, COLUMNS, CHUNK)
        before = tl.cumsum(equal, axis=0) - equal
        left = tl.where(kept - before >= equal, ALL, tl.maximum(kept - before, 0).to(tl.int32))
    tl.store(cuts + row, cut)
    tl.store(ties + row * blocks + block, left, mask=block < blocks)

# type: ignore  (what Triton compiles is not what a type checker reads)
"""Texts of one token per KV slot: writing their tokens, and drafting from them by n-grams."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_tokens_kernel(token_ids, slot_mapping, history, rows, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per ROWS rows."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slot_mapping + row, mask=inside, other=-1)
    token = tl.load(token_ids + row, mask=inside, other=0)
    tl.store(history + slot, token.to(tl.int32), mask=slot >= 0)


@triton.jit
def _token_at(history, table, place, there, BLOCK: tl.constexpr):
    """Return the tokens at some places of a text; -1 where not `there`, or in the null block."""
    block = tl.load(table + place // BLOCK, mask=there, other=0).to(tl.int64)
    return tl.load(history + block * BLOCK + place % BLOCK, mask=there & (block != 0), other=-1)


@triton.jit
def ngram_propose_kernel(
    history, block_table, seq_lens, draft_token_ids, table_stride, drafts_stride, max_model_len, drafts,
    MIN: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, DRAFTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request, which looks at PLACES places at a time. DRAFTS is a power of two that holds K."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    table = block_table + request * table_stride
    length = tl.minimum(tl.load(seq_lens + request).to(tl.int64), max_model_len)
    best = tl.full((PLACES,), -1, tl.int64)
    for first in range(0, length - 1, PLACES):
        place = first + tl.arange(0, PLACES)  # of the last token of an n-gram
        matches, matched = place < length - 1, tl.zeros((PLACES,), tl.int64)
        for back in tl.static_range(MAX):
            last = _token_at(history, table, tl.maximum(length - 1 - back, 0), length > back, BLOCK)
            earlier = _token_at(history, table, tl.maximum(place - back, 0), (place >= back) & (place < length), BLOCK)
            matches = matches & (earlier == last) & (last >= 0)
            matched += matches.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= MIN, matched * max_model_len + place, -1))
    found = tl.max(best, axis=0)
    begin = tl.where(found >= 0, found % max_model_len + 1, tl.maximum(length - 1, 0))
    column = tl.arange(0, DRAFTS)
    place = begin + column % tl.maximum(length - begin, 1)
    token = _token_at(history, table, place, (column < drafts) & (length > 0), BLOCK)
    tl.store(
        draft_token_ids + request * drafts_stride + column, tl.maximum(token, 0).to(tl.int64), mask=column < drafts
    )

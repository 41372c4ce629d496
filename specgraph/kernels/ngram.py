"""Kernels that write the tokens of texts, one per KV slot, and draft from the texts by n-grams."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, power_of_two


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
    """Return the tokens at places of a text. A token is -1 if not `there`, or if its block is the null block."""
    block = tl.load(table + place // BLOCK, mask=there, other=0).to(tl.int64)
    return tl.load(history + block * BLOCK + place % BLOCK, mask=there & (block != 0), other=-1)


@triton.jit
def ngram_propose_kernel(
    history, block_table, seq_lens, draft_token_ids, table_stride, drafts_stride, max_model_len, drafts,
    MIN: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, DRAFTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request. It looks at PLACES places at a time. DRAFTS is a power of two that holds K."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    table = block_table + request * table_stride
    length = tl.minimum(tl.load(seq_lens + request).to(tl.int64), max_model_len)
    best = tl.full((PLACES,), -1, tl.int64)
    for first in range(0, length - 1, PLACES):
        place = first + tl.arange(0, PLACES)  # the place of an n-gram's last token
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


class NgramOps(Launcher):
    """Implementations of the ops in `specgraph.ops.ngram`."""

    __slots__ = ()

    def keep_tokens(self, token_ids: Tensor, slot_mapping: Tensor, history: Tensor) -> None:
        rows, at_once = token_ids.shape[0], 128
        self.launch(
            keep_tokens_kernel, (ceil_div(rows, at_once),),
            token_ids.contiguous(), slot_mapping.contiguous(), history, rows, ROWS=at_once, num_warps=4,
        )  # fmt: skip

    def ngram_propose(
        self, history: Tensor, block_table: Tensor, seq_lens: Tensor, prompt_lookup_min: int, prompt_lookup_max: int,
        max_model_len: int, draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        requests, drafts = draft_token_ids.shape
        if draft_token_ids.stride(1) != 1 or block_table.stride(1) != 1:
            return NotImplemented
        self.launch(
            ngram_propose_kernel, (requests,),
            history, block_table, seq_lens.contiguous(), draft_token_ids, block_table.stride(0),
            draft_token_ids.stride(0), max_model_len, drafts, MIN=prompt_lookup_min, MAX=prompt_lookup_max,
            BLOCK=history.shape[1], PLACES=1024, DRAFTS=power_of_two(drafts), num_warps=8,
        )  # fmt: skip

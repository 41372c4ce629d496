"""Triton kernels that find the candidates of each row in its logits, and draw among candidates."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.noise import real_numbers
from specgraph.kernels.sampling import write_token
from specgraph.ops.draft_sampling import Drafts
from specgraph_models.kernels.convolution import ConvolutionOps
from specgraph_models.ops.blocks import Shortlist

_COLUMNS = 4096
"""Columns of logits per program."""
_GROUP = 128
"""Columns of a group. The best k logits of a row are in the k groups with the best logits."""
_MOST = 32
"""The most candidates that the kernels search."""

NOTHING = tl.constexpr(-9223372036854775807)
"""A key below that of any logit."""


@triton.jit
def key_of(logit, index):
    """Return int64 keys that order float32 logits, and equal ones by their indices (int32), the lowest first."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def best_of_groups_kernel(
    logits, best, columns, stride, groups, GROUP: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Write the best logit of each group of GROUP columns to best [rows, groups], one program per row and COLUMNS."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    score = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.reshape(real_numbers(score, inside), (COLUMNS // GROUP, GROUP))
    group = tl.program_id(1) * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    tl.store(best + row * groups + group, tl.max(score, axis=1), mask=group < groups)


@triton.jit
def top_logits_kernel(
    logits, best, values, ids, columns, stride, groups, COUNT: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the COUNT best logits and columns of each row, from the best of its groups, one program per row.

    SLOTS and GROUPS are powers of two that hold COUNT and groups.
    """
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, GROUPS)
    known = item < groups
    key = key_of(tl.load(best + row * groups + item, mask=known, other=0.0), item)
    key = tl.where(known, key, NOTHING)
    slot = tl.arange(0, SLOTS)
    chosen = slot * 0 + groups  # beyond the last column
    for j in range(COUNT):
        first = tl.max(key, axis=0)
        key = tl.where(key == first, NOTHING, key)
        group = (0x7FFFFFFF - (first & 0x7FFFFFFF)).to(tl.int32)
        chosen = tl.where((slot == j) & (first != NOTHING), group, chosen)
    column = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < columns
    score = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, key_of(real_numbers(score, inside), column), NOTHING)
    for j in range(COUNT):
        first = tl.max(tl.max(key, axis=1), axis=0)
        key = tl.where(key == first, NOTHING, key)
        bits = (first >> 32).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(values + row * COUNT + j, bits.to(tl.float32, bitcast=True).to(values.dtype.element_ty))
        tl.store(ids + row * COUNT + j, 0x7FFFFFFF - (first & 0x7FFFFFFF))


@triton.jit
def draft_from_shortlist_kernel(
    ids, logits, state, predecessor, successor, token_ids, draft_to_target, draft_token_ids, count, rank, ids_stride,
    logits_stride, state_stride, token_stride, draft_stride, COUNT: tl.constexpr, RANK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the best candidate of each request, one program per request. COUNT and RANK are powers of two."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, COUNT)
    known = item < count
    part = tl.arange(0, RANK)
    inside = part < rank
    token = tl.load(token_ids + request * token_stride)
    own = tl.load(ids + request * ids_stride + item, mask=known, other=0)
    factor = tl.load(state + request * state_stride + part, mask=inside, other=0.0).to(tl.float32)
    follows = tl.load(
        successor + own[:, None] * rank + part[None, :], mask=known[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    factor *= tl.load(predecessor + token * rank + part, mask=inside, other=0.0).to(tl.float32)
    score = tl.load(logits + request * logits_stride + item, mask=known, other=0.0)
    total = score.to(tl.float32) + tl.sum(follows * factor[None, :], axis=1)
    total = real_numbers(total.to(score.dtype).to(tl.float32), known)
    best = tl.max(total, axis=0)
    chosen = tl.min(tl.where(known & (total == best), own, 9223372036854775807), axis=0)
    write_token(chosen, draft_to_target, None, None, draft_token_ids, request, 1, draft_stride)


class CandidateOps(ConvolutionOps):
    """Implementations of `top_logits` and `draft_from_shortlist`."""

    __slots__ = ()

    def top_logits(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows, columns = logits.shape
        if not 0 < count <= _MOST or not rows:
            return NotImplemented
        logits, groups = contiguous_rows(logits), ceil_div(columns, _GROUP)
        best = logits.new_empty((rows, groups), dtype=torch.float32)
        self.launch(
            best_of_groups_kernel, (rows, ceil_div(columns, _COLUMNS)),
            logits, best, columns, logits.stride(0), groups, GROUP=_GROUP, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
        values, ids = logits.new_empty(rows, count), logits.new_empty((rows, count), dtype=torch.int64)
        self.launch(
            top_logits_kernel, (rows,),
            logits, best, values, ids, columns, logits.stride(0), groups, COUNT=count, SLOTS=power_of_two(count),
            GROUPS=power_of_two(groups), GROUP=_GROUP, num_warps=4,
        )  # fmt: skip
        return values, ids

    def draft_from_shortlist(self, shortlist: Shortlist, drafts: Drafts) -> None:
        ids, logits, state = (contiguous_rows(tensor) for tensor in shortlist[:3])
        (requests, count), rank = ids.shape, state.shape[1]
        draft_token_ids, token_ids = drafts.draft_token_ids, shortlist.token_ids
        if requests:
            self.launch(
                draft_from_shortlist_kernel, (requests,),
                ids, logits, state, shortlist.predecessor.contiguous(), shortlist.successor.contiguous(), token_ids,
                drafts.draft_to_target, draft_token_ids, count, rank, ids.stride(0), logits.stride(0), state.stride(0),
                token_ids.stride(0), draft_token_ids.stride(0), COUNT=power_of_two(count), RANK=power_of_two(rank),
                num_warps=4,
            )  # fmt: skip

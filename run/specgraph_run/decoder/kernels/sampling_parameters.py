"""Sampling parameters without a sort: `adjust_logits` in five passes.

1. Add bias and penalties, and find the largest logit of each block of columns.
2. Find the number and the weight of the tokens within 3, 5, 7, ... powers of two of the largest. They tell which two of
   these cuts the kept tokens end between.
3. Collect the weights between the two cuts, block by block without gaps. Most distributions have few.
4. One program per row searches these for the smallest kept weight, bit by bit (`smallest_kept.py`).
5. Every token that is not kept gets the logit EXCLUDED.

All weights are integers (`weights_of` of the reference), so blocks may be added in any order. They have 24 significant
bits, so float32 holds them, and the bits of positive float32 numbers are ordered like their values. Launch these
kernels without fusing products and sums: `weights_of` must give the same bits everywhere.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph_run.decoder.kernels.smallest_kept import (
    ALL,
    bracket,
    is_filtered,
    least_weight,
    octaves_of,
    select_kernel,
)
from specgraph_run.decoder.ops.sampling_parameters import SamplingParameters

CUTS = 8
"""The number of cuts; see `smallest_kept.octaves_of`."""
_COLUMNS = 4096
"""Columns per program."""
_CHUNK = 4096
"""The collected weights that the search reads at a time."""


@triton.jit
def row_weights(adjusted, tops, temperature, row, request, column, columns, blocks, BLOCKS: tl.constexpr):
    """Return the weights, int64, of a row's columns, and how many powers of two each is below the largest."""
    block = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)
    warmth = tl.load(temperature + request)
    scale = tl.div_rn(warmth * 0.0 + 1.4426950408889634, warmth)
    inside = column < columns
    x = tl.load(adjusted + row.to(tl.int64) * columns + column, mask=inside, other=float("-inf"))
    power = (x - top) * scale
    power = tl.where(power > -63, power, -63.0)
    whole = tl.floor(power)
    part = power - whole
    value = part * 0.0018671301659196615 + 0.009017029777169228
    value = value * part + 0.05579991266131401
    value = value * part + 0.24016444385051727
    value = value * part + 0.6931512951850891
    value = value * part + 1.0
    mantissa = tl.minimum((value * 8388608.0).to(tl.int32), 16777215)
    octave = -whole.to(tl.int32)
    return (mantissa.to(tl.int64) << 17) >> octave.to(tl.int64), octave


@triton.jit
def adjust_kernel(
    logits, draft_token_ids, repetition, presence, frequency, bias, output_counts, in_prompt, ancestors,
    draft_to_target, adjusted, tops, columns, vocab, stride, per_request, steps, draft_stride, blocks,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add bias and penalties, one program per row and block of columns."""
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    request = row // per_request
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    token = column.to(tl.int64)
    if draft_to_target is not None:
        token += tl.load(draft_to_target + column, mask=inside, other=0)
    of_request = request.to(tl.int64) * vocab + token
    at = logits + row.to(tl.int64) * stride + column
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    x += tl.load(bias + of_request, mask=inside, other=0.0)
    again = tl.load(repetition + request)
    once = tl.load(presence + request)
    each = tl.load(frequency + request)
    if (again != 1) | (once != 0) | (each != 0):
        counts = tl.load(output_counts + of_request, mask=inside, other=0)
        for draft in range(steps):
            id = tl.load(draft_token_ids + request * draft_stride + draft)
            if ancestors is None:  # noqa: SIM108  (decided when the kernel is compiled)
                before = draft < row % per_request
            else:
                before = ((tl.load(ancestors + row) >> (draft + 1)) & 1) != 0
            counts += ((token == id) & before & (id >= 0)).to(tl.int32)
        known = tl.load(in_prompt + of_request, mask=inside, other=0) != 0
        known = known | (counts > 0)
        x = tl.where(known, tl.where(x > 0, tl.div_rn(x, again + x * 0.0), x * again), x)
        x = x - each * counts.to(tl.float32) - once * (counts > 0).to(tl.float32)
    tl.store(adjusted + row.to(tl.int64) * columns + column, x, mask=inside)
    tl.store(tops + row * blocks + block, tl.max(x, axis=0))


@triton.jit
def cut_kernel(
    adjusted, tops, temperature, top_k, top_p, min_p, counts, sums, columns, per_request, blocks,
    CUTS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the number (counts, int32) and the weight (sums, int64) of a block's tokens within each cut.

    Both are [rows, blocks, CUTS]. Counts are written only if the request has top_k, sums only if it has top_p.
    """
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    request = row // per_request
    if not is_filtered(temperature, top_k, top_p, min_p, request):
        return
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    weight, octave = row_weights(adjusted, tops, temperature, row, request, column, columns, blocks, BLOCKS)
    weight = tl.where(weight.to(tl.float32) >= least_weight(min_p, request), weight, 0)
    octave = tl.where(weight > 0, octave, 64)
    to = (row * blocks + block) * CUTS
    for cut in tl.static_range(CUTS):
        within = octave <= octaves_of(cut)
        if tl.load(top_k + request) > 0:
            tl.store(counts + to + cut, tl.sum(within.to(tl.int32), axis=0))
        if tl.load(top_p + request) < 1:
            tl.store(sums + to + cut, tl.sum(tl.where(within, weight, 0), axis=0))


@triton.jit
def collect_kernel(
    adjusted, tops, temperature, top_k, top_p, min_p, counts, sums, found, held, columns, per_request, blocks,
    CUTS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the weights between the two cuts, float32, to the first held[row, block] of found[row, block, COLUMNS]."""
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    request = row // per_request
    if not is_filtered(temperature, top_k, top_p, min_p, request):
        return
    first, last, by_number, by_weight, _, _, _ = bracket(counts, sums, top_k, top_p, row, request, blocks, CUTS, BLOCKS)
    if by_number | by_weight:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        weight, octave = row_weights(adjusted, tops, temperature, row, request, column, columns, blocks, BLOCKS)
        weight = weight.to(tl.float32)
        above = tl.where(first > 0, octaves_of(first - 1), -1)
        taken = (octave > above) & (octave <= octaves_of(last)) & (weight >= least_weight(min_p, request))
        place = tl.cumsum(taken.to(tl.int32), axis=0)
        to = found + (row.to(tl.int64) * blocks + block) * COLUMNS
        tl.store(to + place - 1, weight, mask=taken)
        tl.store(held + row * blocks + block, tl.sum(taken.to(tl.int32), axis=0))


@triton.jit
def exclude_kernel(
    adjusted, tops, temperature, top_k, top_p, min_p, cuts, ties, columns, per_request, blocks,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write EXCLUDED for tokens below the smallest kept weight, and for equal ones beyond the number to keep."""
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    request = row // per_request
    if not is_filtered(temperature, top_k, top_p, min_p, request):
        return
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    weight, _ = row_weights(adjusted, tops, temperature, row, request, column, columns, blocks, BLOCKS)
    bits = weight.to(tl.float32).to(tl.int32, bitcast=True)
    cut = tl.load(cuts + row)
    left = tl.load(ties + row * blocks + block)
    kept = bits >= cut
    if left != ALL:
        equal = bits == cut
        kept = kept & ((bits != cut) | (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    tl.store(adjusted + row.to(tl.int64) * columns + column, -1e30, mask=(column < columns) & ~kept)


class SamplingParameterOps(Launcher):
    """The implementation of `adjust_logits`."""

    __slots__ = ()

    def adjust_logits(
        self, logits: Tensor, temperature: Tensor, parameters: SamplingParameters, draft_token_ids: Tensor,
        ancestors: Tensor | None = None, draft_to_target: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        logits = contiguous_rows(logits)
        (rows, columns), (requests, steps) = logits.shape, draft_token_ids.shape
        adjusted = logits.new_empty(rows, columns, dtype=torch.float32)
        if rows == 0:
            return adjusted
        wide = min(_COLUMNS, power_of_two(columns))
        blocks, per_request = ceil_div(columns, wide), rows // requests

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return logits.new_empty((rows, *shape), dtype=dtype)

        filters = temperature, *parameters[:3]
        tops = scratch(blocks, dtype=torch.float32)
        within = scratch(blocks, CUTS), scratch(blocks, CUTS, dtype=torch.int64)
        found, held = scratch(blocks, wide, dtype=torch.float32), scratch(blocks)
        cuts, ties = scratch(), scratch(blocks)
        options: dict[str, Any] = {"COLUMNS": wide, "enable_fp_fusion": False}
        how: dict[str, Any] = {"num_warps": 4, **options}
        shape: dict[str, Any] = {"BLOCKS": power_of_two(blocks), "CUTS": CUTS, **options}
        self.launch(
            adjust_kernel, (rows, blocks),
            logits, draft_token_ids, *parameters[3:], ancestors, draft_to_target, adjusted, tops, columns,
            parameters.bias.shape[1], logits.stride(0), per_request, steps, draft_token_ids.stride(0), blocks, **how,
        )  # fmt: skip
        self.launch(
            cut_kernel, (rows, blocks),
            adjusted, tops, *filters, *within, columns, per_request, blocks, num_warps=4, **shape,
        )  # fmt: skip
        self.launch(
            collect_kernel, (rows, blocks),
            adjusted, tops, *filters, *within, found, held, columns, per_request, blocks, num_warps=4, **shape,
        )  # fmt: skip
        self.launch(
            select_kernel, (rows,),
            *filters, *within, found, held, cuts, ties, per_request, blocks,
            CHUNK=max(16, _CHUNK // power_of_two(blocks)), num_warps=8, **shape,
        )  # fmt: skip
        self.launch(
            exclude_kernel, (rows, blocks),
            adjusted, tops, *filters, cuts, ties, columns, per_request, blocks, BLOCKS=shape["BLOCKS"], **how,
        )  # fmt: skip
        return adjusted

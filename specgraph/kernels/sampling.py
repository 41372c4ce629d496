"""Kernels that pick tokens from logits: first in each block of the vocabulary, then one kernel compares the blocks."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.linear import first_lines, load_rows, x_row_starts
from specgraph.kernels.linear_fp8 import Fp8LinearOps
from specgraph.kernels.noise import best_by_gumbel, best_of, real_numbers, scaled
from specgraph.ops.draft_sampling import Drafts, Draws, LmHead
from specgraph.ops.linear import Norm, Weight

MAX_SAMPLED_ROWS = 32
"""If there are more rows, a kernel of its own draws the noise: the linear has too few threads for it."""

_COLUMNS = 4096
"""Columns of stored logits or of a distribution, per program."""


@triton.jit
def pick_kernel(
    logits, best_value, best_index, tops, totals, temperature, seeds, first_position, more_positions, columns, stride,
    blocks, steps, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Do as `head_kernel` does, from stored logits, one program per row and block of columns.

    Row i draws token i % steps of request i // steps. Its noise has the position
    first_position + more_positions + 1 + i % steps.
    """
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = logits + row.to(tl.int64) * stride + column
    scores = real_numbers(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32), inside)[None, :]
    to = row * blocks + block + tl.arange(0, 1)
    if temperature is not None:
        request = row // steps + tl.arange(0, 1)
        warmth = tl.load(temperature + request)
        position = tl.load(first_position + request).to(tl.int64) + row % steps + 1
        if more_positions is not None:
            position += tl.load(more_positions + request)
        seed = tl.load(seeds + request)
        value, index, top, total = best_by_gumbel(scaled(scores, warmth), warmth, seed, position, column)
        tl.store(tops + to, top)
        tl.store(totals + to, total)
    else:
        value, index = best_of(scores)
    tl.store(best_value + to, value)
    tl.store(best_index + to, block * COLUMNS + index)


@triton.jit
def write_token(token, draft_to_target, draft_step, token_ids, draft_token_ids, row, steps, draft_stride):
    """Write the token of one row, as a target id, to `draft_token_ids`.

    With `draft_step`, row i is request i. Its token goes to column `draft_step`, and to `token_ids`. Without it, row i
    is column i % steps of request i // steps.
    """
    if draft_to_target is not None:
        token += tl.load(draft_to_target + token)
    if draft_step is not None:
        tl.store(token_ids + row, token)
        tl.store(draft_token_ids + row * draft_stride + tl.load(draft_step), token)
    else:
        tl.store(draft_token_ids + (row // steps) * draft_stride + row % steps, token)


@triton.jit
def best_token(best_value, best_index, row, blocks, BLOCKS: tl.constexpr):
    """Return the column (int64) of one row's best value in all blocks, the lowest among equals."""
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    value = tl.load(best_value + row * blocks + block, mask=known, other=float("-inf"))
    index = tl.load(best_index + row * blocks + block, mask=known, other=2147483647)
    best = tl.max(value, axis=0)
    return tl.min(tl.where(value == best, index, 2147483647), axis=0).to(tl.int64)


@triton.jit
def finish_greedy_kernel(
    best_value, best_index, draft_to_target, draft_step, token_ids, draft_token_ids, blocks, steps, draft_stride,
    BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the best token of each row, one program per row; see `write_token`."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0)
    token = best_token(best_value, best_index, row, blocks, BLOCKS)
    write_token(token, draft_to_target, draft_step, token_ids, draft_token_ids, row, steps, draft_stride)


@triton.jit
def finish_sampled_kernel(
    logits, best_value, best_index, tops, totals, draft_to_target, temperature, draft_step, token_ids, draft_token_ids,
    draft_probs, blocks, columns, stride, steps, draft_stride, request_stride, step_stride,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write distributions, one program per row and COLUMNS columns. A row's first program also writes the token."""
    if OVERLAP is not None:
        OVERLAP()
    row = tl.program_id(0)
    request = row // steps
    token = best_token(best_value, best_index, row, blocks, BLOCKS)
    step = row % steps
    if draft_step is not None:
        step = tl.load(draft_step).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    part = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(part, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(part - base) * tl.load(totals + row * blocks + block, mask=block < blocks, other=0.0), axis=0)
    warmth = tl.load(temperature + request)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    score = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    score = real_numbers(score, inside) * tl.where(warmth > 0, 1.0 / warmth, 1.0)
    share = tl.where(warmth > 0, tl.exp(score - base) / total, (column == token).to(tl.float32))
    to = request.to(tl.int64) * request_stride + step * step_stride + column
    tl.store(draft_probs + to, share, mask=inside)
    if tl.program_id(1) == 0:
        write_token(token, draft_to_target, draft_step, token_ids, draft_token_ids, row, steps, draft_stride)


@triton.jit
def head_kernel(
    x, weight, added, row_ids, logits, best_value, best_index, tops, totals, temperature, seeds, first_position,
    more_positions, draft_step, draft_column, rows, columns, depth, x_stride, added_stride, row_ids_stride, blocks,
    TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Find the best logit and its column in each block of columns of the logits x[row_ids] @ weight.T + added.

    They go to best_value and best_index [rows, blocks]. Logits are rounded to the model's dtype before they are
    compared, as if they had been stored. With a temperature, logits [rows, columns] are stored, and best_value,
    best_index, tops and totals get the results of `best_by_gumbel`. `draft_column` gets the value of `draft_step`, for
    a later kernel that writes `draft_step`. TURN is set if other launches read the same weight: 0 begins with the first
    block, 1 with the last.
    """
    block = tl.program_id(0)
    if TURN == 1:
        block = tl.num_programs(0) - 1 - block
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    safe = tl.minimum(column, columns - 1)
    if OVERLAP is not None:
        OVERLAP(WAIT=False)
        OVERLAP(first_lines(weight, safe, depth, PREFETCH), START=False)
    row = tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, DEPTH)[None, :]
    inside = (column < columns)[None, :]
    taken = row
    if row_ids is not None:
        taken = tl.load(row_ids + row * row_ids_stride, mask=live, other=0)
    if added is not None:
        at = added + row.to(tl.int64)[:, None] * added_stride + column[None, :]
        more = tl.load(at, mask=live[:, None] & inside, other=0.0)
    x_rows = x_row_starts(x, weight, taken, row, rows, columns, depth, x_stride, MASKED)[:, None] + inner
    w_rows = weight + safe.to(tl.int64)[:, None] * depth + inner
    if draft_column is not None:
        tl.store(draft_column, tl.load(draft_step, mask=block == 0, other=0), mask=block == 0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = load_rows(x_rows + k, live, MASKED)
        w = tl.load(w_rows + k, eviction_policy="evict_first" if TURN is None else "")
        acc = tl.dot(a, tl.trans(w), acc)
    rounded = acc.to(x.dtype.element_ty)
    if added is not None:
        rounded = (rounded.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
    scores = real_numbers(rounded.to(tl.float32), inside)
    if temperature is not None:
        at = logits + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(at, rounded, mask=live[:, None] & inside)
        warmth = tl.load(temperature + row, mask=live, other=0.0)
        position = tl.load(first_position + row, mask=live, other=0).to(tl.int64) + 1
        if more_positions is not None:
            position += tl.load(more_positions + row, mask=live, other=0)
        seed = tl.load(seeds + row, mask=live, other=0)
        value, index, top, total = best_by_gumbel(scaled(scores, warmth), warmth, seed, position, column)
        tl.store(tops + row * blocks + block, top, mask=live)
        tl.store(totals + row * blocks + block, total, mask=live)
    else:
        value, index = best_of(scores)
    tl.store(best_value + row * blocks + block, value, mask=live)
    tl.store(best_index + row * blocks + block, block * COLUMNS + index, mask=live)


class Picked(NamedTuple):
    """The best token of each block of columns. If tokens are sampled, also the logits and each block's softmax part."""

    value: Tensor
    """float32 [rows, blocks]"""
    index: Tensor
    """int32 [rows, blocks]: the column of `value`."""
    logits: Tensor | None = None
    """[rows, vocab]"""
    top: Tensor | None = None
    """float32 [rows, blocks]: the largest logit / temperature."""
    total: Tensor | None = None
    """float32 [rows, blocks]: the sum of exp(logit / temperature - top)."""

    @property
    def blocks(self) -> int:
        """The number of blocks of columns."""
        return self.value.shape[1]


def _allocate_picked(like: Tensor, blocks: int, logits: Tensor | None) -> Picked:
    """Allocate the tensors for the rows of `like`. The softmax's parts are allocated only if logits are given."""
    shape = like.shape[0], blocks

    def floats() -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    top, total = (None, None) if logits is None else (floats(), floats())
    return Picked(floats(), like.new_empty(shape, dtype=torch.int32), logits, top, total)


class SamplingOps(Fp8LinearOps):
    """Implementations of the ops in `specgraph.ops.draft_sampling`."""

    __slots__ = ()

    def draft_from_logits(self, logits: Tensor, drafts: Drafts, draws: Draws | None = None) -> None:
        self._finish(self._pick(logits, draws, drafts.rows), drafts, draws)

    def draft_from_hidden(self, x: Tensor, head: LmHead, drafts: Drafts, draws: Draws | None = None) -> None:
        if draws is not None and drafts.rows > 1:
            norm = None if head.norm is None else Norm(head.norm, head.eps)
            logits = self.norm_linear(head.taken(x), norm, Weight(head.weight), head.added)
            picked = self._pick(logits, draws, drafts.rows)
        else:
            picked = self.best_by_block(x, head, draws)
        self._finish(picked, drafts, draws)

    def best_by_block(
        self, x: Tensor, head: LmHead, draws: Draws | None, step: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> Picked:
        """Return the best token of each block of columns of `head.logits(x)`. With `draws`, requests have one row each.

        step: `draft_step`, and an int64 [1] that gets its value unless a library matmul computes the logits.
        """
        _, _, weight, added, row_ids, turn = head
        x = self._normed(x, None if head.norm is None else Norm(head.norm, head.eps))
        few, own = self.options.few_rows, self._own(x, None)
        if added is not None or row_ids is not None:
            few = own = None
        if few is not None and draws is None and (found := few.best(x, weight, *step)) is not None:
            return Picked(*found)
        if own is not None and draws is None and (found := own.best(x, weight, *step)) is not None:
            return Picked(*found)
        rows = x if row_ids is None else x[:1].expand(row_ids.shape[0], -1)
        tile = self._tile("head", rows, weight, weight.shape[0])
        if tile is None:
            return self._pick(head._replace(norm=None).logits(x), draws)
        if draws is not None and rows.shape[0] > MAX_SAMPLED_ROWS:
            return self._pick(self._linear(head.taken(x), weight, None, added, tile), draws)
        count, columns = rows.shape[0], weight.shape[0]
        added = None if added is None else contiguous_rows(added)
        logits = None if draws is None else x.new_empty(count, columns)
        picked = _allocate_picked(rows, ceil_div(columns, tile.columns), logits)
        noise = (None, None, None, None) if draws is None else draws[:4]
        strides = (0 if tensor is None else tensor.stride(0) for tensor in (added, row_ids))
        self.launch(
            head_kernel, (picked.blocks,),
            x, weight, added, row_ids, logits, picked.value, picked.index, picked.top, picked.total, *noise, *step,
            count, columns, weight.shape[1], x.stride(0), *strides, picked.blocks, None if turn is None else turn % 2,
            **self._shape(tile, rows, picked.blocks),
        )  # fmt: skip
        return picked

    def _pick(self, logits: Tensor, draws: Draws | None, rows: int = 1) -> Picked:
        """Return the best token of each block of 4096 columns of stored logits. A request has `rows` rows."""
        logits = contiguous_rows(logits)
        count, vocab = logits.shape
        picked = _allocate_picked(logits, ceil_div(vocab, _COLUMNS), None if draws is None else logits)
        noise = (None,) * 4 if draws is None else draws[:4]
        self.launch(
            pick_kernel, (count, picked.blocks),
            logits, picked.value, picked.index, picked.top, picked.total, *noise, vocab, logits.stride(0),
            picked.blocks, rows, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return picked

    def _finish(self, picked: Picked, drafts: Drafts, draws: Draws | None) -> None:
        """Write the token of each row (see `write_token`) and its distribution."""
        draft_token_ids, draft_to_target, draft_step, token_ids = drafts
        require_rows(drafts, *(() if draws is None else (draws.draft_probs,)))
        blocks: dict[str, int] = {"BLOCKS": power_of_two(picked.blocks)}
        if draws is None:
            self.launch(
                finish_greedy_kernel, (picked.value.shape[0],),
                picked.value, picked.index, draft_to_target, draft_step, token_ids, draft_token_ids, picked.blocks,
                drafts.rows, draft_token_ids.stride(0), num_warps=4, **blocks,
            )  # fmt: skip
            return
        (count, vocab), probs = picked.logits.shape, draws.draft_probs
        self.launch(
            finish_sampled_kernel, (count, ceil_div(vocab, _COLUMNS)),
            picked.logits, picked.value, picked.index, picked.top, picked.total, draft_to_target, draws.temperature,
            draft_step, token_ids, draft_token_ids, probs, picked.blocks, vocab, picked.logits.stride(0), drafts.rows,
            draft_token_ids.stride(0), probs.stride(0), probs.stride(1), COLUMNS=_COLUMNS, num_warps=8, **blocks,
        )  # fmt: skip


def require_rows(drafts: Drafts, *written: Tensor) -> None:
    """Raise ValueError if token_ids, or a row of another result, is not contiguous: kernels cannot write it."""
    ids, rows = drafts.token_ids, (drafts.draft_token_ids, *written)
    if (ids is not None and not ids.is_contiguous()) or any(t.stride(-1) != 1 for t in rows):
        raise ValueError("token_ids, and the rows of draft_token_ids and draft_probs, must be contiguous")

"""Kernels that accept draft tokens and sample the target's own token after them.

One scan over all logits finds each row's argmax and, for sampling, its softmax. A greedy verify needs that scan too.
One program per request then decides how many draft tokens it accepts. Only the row after these is sampled, in a second
scan over one row per request. After the propose, a kernel writes the inputs of the next verify.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.noise import best_of, exponential, noise_key, real_numbers, uniform
from specgraph_run.decoder.ops.rejection import Acceptance, Sampled

_COLUMNS = 4096
"""Columns of logits per program."""


@triton.jit
def per_temperature(warmth):
    """Return the factor on logits: 1 / temperature, or 1 at temperature 0."""
    return tl.where(warmth > 0, 1.0 / warmth, 1.0)


@triton.jit
def scan_kernel(
    logits, start_positions, temperature, draft_to_target, best_value, best_index, totals, draft_ids, columns,
    draft_columns, stride, blocks, query_len, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the best score and its column in each row's blocks of COLUMNS, one program per row and block.

    With a temperature, also the sum of exp(score - best). A request has query_len rows; rows of inert requests are
    skipped. A score is logit / temperature, or the logit at temperature 0. With `draft_to_target`, also write the draft
    id of each target token to `draft_ids` [columns]. Entries of target tokens without draft id stay as they are.
    """
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    if draft_to_target is not None:  # noqa: SIM102  (decided when the kernel is compiled)
        if row == 0:
            known = column < draft_columns
            token = column + tl.load(draft_to_target + column, mask=known, other=0)
            tl.store(draft_ids + token, column, mask=known)
    request = row // query_len
    if tl.load(start_positions + request) < 0:
        return
    inside = column < columns
    at = logits + row.to(tl.int64) * stride + column
    scores = real_numbers(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32), inside)[None, :]
    if temperature is not None:
        scores *= per_temperature(tl.load(temperature + request))
    value, index = best_of(scores)
    to = row * blocks + block + tl.arange(0, 1)
    tl.store(best_value + to, value)
    tl.store(best_index + to, block * COLUMNS + index)
    if temperature is not None:
        base = tl.where(value == float("-inf"), 0.0, value)
        tl.store(totals + to, tl.sum(tl.exp(scores - base[:, None]), axis=1))


@triton.jit
def draft_probability(draft_probs, draft_to_target, draft_ids, request, row, token, wanted, draft_columns,
                      request_stride, step_stride):  # fmt: skip
    """Return the drafter's probability of each target id `token`. It is 0 if not `wanted`, or without a draft id."""
    draft_id = token
    if draft_to_target is not None:
        # `draft_ids` may hold anything for a token without draft id, so each id is checked with `draft_to_target`.
        draft_id = tl.load(draft_ids + token, mask=wanted, other=-1).to(tl.int64)
        wanted = wanted & (draft_id >= 0) & (draft_id < draft_columns)
        wanted = wanted & (draft_id + tl.load(draft_to_target + draft_id, mask=wanted, other=0) == token)
    at = draft_probs + request.to(tl.int64) * request_stride + row * step_stride + draft_id
    return tl.load(at, mask=wanted, other=0.0)


@triton.jit
def decide_kernel(
    logits, draft_token_ids, draft_probs, draft_to_target, draft_ids, temperature, seeds, chances, start_positions,
    best_value, best_index, totals, sampled_token_ids, num_sampled, decided, tops, sums, draft_columns, stride,
    draft_stride, request_stride, step_stride, sampled_stride, blocks, steps,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a request's accepted draft tokens, the target's argmax after them, then -1, and the number of tokens.

    With a temperature, `decided` gets the row with a token that is still to be sampled, or -1 if there is none. `tops`
    and `sums` get the maximum and the sum of that row's softmax. With `chances`, draft token i is accepted with
    probability chances[i].
    """
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    start = tl.load(start_positions + request)
    row = tl.arange(0, ROWS)
    to = sampled_token_ids + request * sampled_stride + row
    if start < 0:
        tl.store(to, tl.full((ROWS,), -1, tl.int64), mask=row <= steps)
        tl.store(num_sampled + request, 0)
        if temperature is not None:
            tl.store(decided + request, -1)
        return
    first = request * (steps + 1)
    block = tl.arange(0, BLOCKS)
    part = (first + row)[:, None] * blocks + block[None, :]
    known = (row <= steps)[:, None] & (block < blocks)[None, :]
    value = tl.load(best_value + part, mask=known, other=float("-inf"))
    top = tl.max(value, axis=1)
    index = tl.load(best_index + part, mask=known, other=2147483647)
    best = tl.min(tl.where(value == top[:, None], index, 2147483647), axis=1).to(tl.int64)
    draft = tl.load(draft_token_ids + request * draft_stride + row, mask=row < steps, other=-1)
    given = draft >= 0
    accept = draft == best
    if chances is not None:
        chance = tl.load(chances + row, mask=row < steps, other=0.0)
        accept = given & (uniform(noise_key(tl.load(seeds + request), start + 1 + row, 2), row * 0) < chance)
    if temperature is not None:
        warmth = tl.load(temperature + request)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.load(totals + part, mask=known, other=0.0)
        total = tl.maximum(tl.sum(tl.exp(value - base[:, None]) * total, axis=1), 1.0)  # all logits may be -inf
        score = tl.load(logits + (first + row).to(tl.int64) * stride + draft, mask=given, other=float("-inf"))
        p = tl.exp(real_numbers(score.to(tl.float32), given) * per_temperature(warmth) - base) / total
        q = tl.where(given, 1.0, 0.0)
        if draft_probs is not None:
            q = draft_probability(draft_probs, draft_to_target, draft_ids, request, row, draft, given, draft_columns,
                                  request_stride, step_stride)  # fmt: skip
        number = uniform(noise_key(tl.load(seeds + request), start + 1 + row, 2), row * 0)
        accept = tl.where(warmth > 0, given & (number * q < p), accept)
    accepted = tl.min(tl.where(accept | (row >= steps), steps, row), axis=0)
    own = tl.sum(tl.where(row == accepted, best, 0), axis=0)
    tl.store(to, tl.where(row < accepted, draft, tl.where(row == accepted, own, -1)), mask=row <= steps)
    tl.store(num_sampled + request, accepted + 1)
    if temperature is not None:
        tl.store(decided + request, tl.where(warmth > 0, accepted, -1))
        tl.store(tops + request, tl.sum(tl.where(row == accepted, base, 0.0), axis=0))
        tl.store(sums + request, tl.sum(tl.where(row == accepted, total, 0.0), axis=0))


@triton.jit
def resample_kernel(
    logits, draft_token_ids, draft_probs, draft_to_target, draft_ids, temperature, seeds, start_positions, decided,
    tops, sums, best_value, best_index, columns, draft_columns, stride, draft_stride, request_stride, step_stride,
    blocks, steps, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the best key of the residual and the best key of the target in each block of COLUMNS of the decided row.

    `best_value` and `best_index` are [requests, 2, blocks]. The residual is max(p - q, 0), with the target's p and the
    drafter's q. If p equals q up to rounding, the residual is 0 everywhere, and the target's keys are used. A key is
    x / e with exponential e: its argmax is the argmax of log(x) + Gumbel noise.
    """
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    request = tl.program_id(0)
    row = tl.load(decided + request)
    if row < 0:
        return
    column = (block * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = column < columns
    at = logits + (request * (steps + 1) + row).to(tl.int64) * stride + column
    score = real_numbers(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32), inside)
    score *= per_temperature(tl.load(temperature + request))
    p = tl.exp(score - tl.load(tops + request)) / tl.load(sums + request)
    draft = tl.load(draft_token_ids + request * draft_stride + row, mask=row < steps, other=-1)
    if draft_probs is None:
        q = tl.where(column == draft, 1.0, 0.0)
    else:
        q = draft_probability(draft_probs, draft_to_target, draft_ids, request, row, column, inside & (draft >= 0),
                              draft_columns, request_stride, step_stride)  # fmt: skip
    position = tl.load(start_positions + request) + 1 + row
    key = 1.0 / exponential(noise_key(tl.load(seeds + request), position, 3), column)
    rest, rest_index = best_of(tl.where(inside, tl.maximum(p - q, 0.0) * key, -1.0)[None, :])
    own, own_index = best_of(tl.where(inside, p * key, -1.0)[None, :])
    to = request * 2 * blocks + block + tl.arange(0, 1)
    tl.store(best_value + to, rest)
    tl.store(best_index + to, block * COLUMNS + rest_index)
    tl.store(best_value + to + blocks, own)
    tl.store(best_index + to + blocks, block * COLUMNS + own_index)


@triton.jit
def write_own_kernel(
    best_value, best_index, decided, sampled_token_ids, sampled_stride, blocks, BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the token of each request's decided row, the lowest token among equal keys."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    row = tl.load(decided + request)
    if row < 0:
        return
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    at = request * 2 * blocks + block
    value = tl.load(best_value + at, mask=known, other=-1.0)
    at += tl.where(tl.max(value, axis=0) > 0, 0, blocks)
    value = tl.load(best_value + at, mask=known, other=-1.0)
    index = tl.load(best_index + at, mask=known, other=2147483647)
    token = tl.min(tl.where(value == tl.max(value, axis=0), index, 2147483647), axis=0)
    tl.store(sampled_token_ids + request * sampled_stride + row, token.to(tl.int64))


@triton.jit
def next_verify_kernel(
    sampled_token_ids, num_sampled, draft_token_ids, start_positions, last_token_ids, to_draft_token_ids, drafts,
    sampled_stride, draft_stride, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    count = tl.load(num_sampled + request)
    live = count > 0
    last = tl.load(sampled_token_ids + request * sampled_stride + tl.maximum(count - 1, 0), mask=live, other=0)
    start = tl.load(start_positions + request)
    tl.store(last_token_ids + request, last)
    tl.store(start_positions + request, tl.where(live, start + count, -1))
    offset = tl.arange(0, WIDTH)
    draft = tl.load(draft_token_ids + request * draft_stride + offset, mask=offset < drafts, other=0)
    tl.store(to_draft_token_ids + request * drafts + offset, draft, mask=offset < drafts)


class VerifyOps(Launcher):
    """Implementations of `specgraph_run.decoder.ops.verify_drafts` and `specgraph_run.decoder.ops.next_verify`."""

    __slots__ = ()

    def verify_drafts(
        self, target_logits: Tensor, draft_token_ids: Tensor, start_positions: Tensor, acceptance: Acceptance,
        sampled: Sampled,
    ) -> None:  # fmt: skip
        (requests, steps), (rows, vocab) = draft_token_ids.shape, target_logits.shape
        if requests == 0:
            return
        require_rows(sampled)
        logits, drafts = contiguous_rows(target_logits), contiguous_rows(draft_token_ids)
        starts, (tokens, num_sampled) = start_positions.contiguous(), sampled
        temperature, seeds, draft_probs, draft_to_target, chances = acceptance
        by_temperature = temperature is not None
        if not by_temperature or draft_probs is None:
            draft_probs = draft_to_target = None  # draft tokens are target ids, and nothing else of the drafter is read
        elif draft_probs.stride(-1) != 1:
            draft_probs = draft_probs.contiguous()
        blocks = ceil_div(vocab, _COLUMNS)

        def floats(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.float32)

        def integers(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.int32)

        value, index = floats(rows, blocks), integers(rows, blocks)
        total = decided = top = whole = draft_ids = None
        if by_temperature:
            total, decided = floats(rows, blocks), integers(requests)
            top, whole = floats(requests), floats(requests)
        if draft_to_target is not None:
            draft_ids = integers(vocab)
        draft_vocab = 0 if draft_probs is None else draft_probs.shape[2]
        prob_strides = (0, 0) if draft_probs is None else (draft_probs.stride(0), draft_probs.stride(1))
        self.launch(
            scan_kernel, (rows, blocks),
            logits, starts, temperature, draft_to_target, value, index, total, draft_ids, vocab, draft_vocab,
            logits.stride(0), blocks, steps + 1, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        self.launch(
            decide_kernel, (requests,),
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, chances, starts, value, index,
            total, tokens, num_sampled, decided, top, whole, draft_vocab, logits.stride(0), drafts.stride(0),
            *prob_strides, tokens.stride(0), blocks, steps, ROWS=power_of_two(steps + 1),
            BLOCKS=power_of_two(blocks), num_warps=4,
        )  # fmt: skip
        if not by_temperature:
            return
        value, index = floats(requests, 2, blocks), integers(requests, 2, blocks)
        self.launch(
            resample_kernel, (requests, blocks),
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, starts, decided, top, whole,
            value, index, vocab, draft_vocab, logits.stride(0), drafts.stride(0), *prob_strides, blocks, steps,
            COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        self.launch(
            write_own_kernel, (requests,),
            value, index, decided, tokens, tokens.stride(0), blocks, BLOCKS=power_of_two(blocks), num_warps=1,
        )  # fmt: skip

    def next_verify(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, draft_token_ids: Tensor, start_positions: Tensor,
        last_token_ids: Tensor, to_draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        if not all(t.is_contiguous() for t in (num_sampled, start_positions, last_token_ids, to_draft_token_ids)):
            return NotImplemented
        sampled_token_ids, draft_token_ids = contiguous_rows(sampled_token_ids), contiguous_rows(draft_token_ids)
        drafts = draft_token_ids.shape[1]
        self.launch(
            next_verify_kernel, (num_sampled.shape[0],),
            sampled_token_ids, num_sampled, draft_token_ids, start_positions, last_token_ids, to_draft_token_ids,
            drafts, sampled_token_ids.stride(0), draft_token_ids.stride(0), WIDTH=power_of_two(max(drafts, 1)),
            num_warps=1,
        )  # fmt: skip


def require_rows(sampled: Sampled) -> None:
    """Raise ValueError if num_sampled, or a row of token_ids, is not contiguous: kernels cannot write it."""
    if sampled.token_ids.stride(1) != 1 or not sampled.num_sampled.is_contiguous():
        raise ValueError("num_sampled, and the rows of sampled token_ids, must be contiguous")

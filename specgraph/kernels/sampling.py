# type: ignore  (what Triton compiles is not what a type checker reads)
"""Picking tokens from logits: block by block over the vocabulary, then one kernel that compares the blocks.

Sampling by the Gumbel-max trick makes no pass over the logits that an argmax doesn't make: the same pass also gives the
parts of the softmax. What it adds is one write of the distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Return x through the finaliser of SplitMix64, on uint64; see `specgraph.ops.noise`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position, PURPOSE: tl.constexpr):
    """Return the key that the noise of one (seed, position, purpose) is a function of, beside the index. All int64 ->
    uint64."""
    return mix(mix(mix(seed.to(tl.uint64)) + PURPOSE) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform(key, index):
    """Return numbers as `specgraph.ops.noise.uniform`: float32 in (0, 1) for uint64 keys and the indices of the
    numbers."""
    bits = (mix(key + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15) >> 1) | 1
    return tl.minimum(bits.to(tl.int64).to(tl.float32) * 1.0842021724855044e-19, 0.9999999403953552)


@triton.jit
def exponential(key, index):
    """Return exponential noise, -log(1 - uniform), float32 with a relative error of at most 2^-20.

    The logarithm of 1 - number has lost the precision of a small number: its series is taken, up to 1 / 16.
    """
    v = uniform(key, index)
    series = v + v * v * (0.5 + v * (0.3333333333 + v * (0.25 + v * (0.2 + v * 0.1666666667))))
    return tl.where(v < 0.0625, series, -tl.log(1.0 - v))


@triton.jit
def real_numbers(logits, inside):
    """logits where inside, else -inf. A NaN becomes -inf too, so a padded row of garbage still gives a token."""
    return tl.where(inside & (logits == logits), logits, float("-inf"))


@triton.jit
def scaled(logits, temperature):
    """logits [ROWS, COLUMNS] / temperature [ROWS], or as they are at temperature 0."""
    return logits * tl.where(temperature > 0, 1.0 / temperature, 1.0)[:, None]


@triton.jit
def best_of(scores):
    """Return the largest of each row of scores [ROWS, COLUMNS], and its column: the lowest among equals."""
    return tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def best_by_gumbel(scores, temperature, seed, position, column):
    """Return the largest key (score + noise) of each row and its column, and the row's part of the softmax.

    The noise is that of (seed, position) [ROWS] and column [COLUMNS], none at temperature 0. As it is -log(e) with
    exponential e, the key is top - log(e * exp(top - score)): one logarithm per element, and no division.

    Returns:
        value and index of the key, the largest score (top), and the sum of exp(score - top), each [ROWS].
    """
    top = tl.max(scores, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    below = scores - base[:, None]
    number = exponential(noise_key(seed, position, 1)[:, None], column[None, :])
    value, index = best_of(tl.where((temperature > 0)[:, None], -number * tl.exp(-below), scores))
    return tl.where(temperature > 0, base - tl.log(-value), value), index, top, tl.sum(tl.exp(below), axis=1)


@triton.jit
def pick_kernel(
    logits, best_value, best_index, tops, totals, temperature, seeds, first_position, more_positions, columns, stride,
    blocks, steps, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Do as `head_kernel` does, of stored logits; one program per block of columns and row.

    Row i is that of draft token i % steps of request i // steps, whose noise is that of position
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
    """Write the token of one row, as a target id, to the result.

    With `draft_step` row i is request i: its token goes to that column, and to `token_ids`. Without, row i is column
    i % steps of request i // steps.
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
    """Return the best block's column (int64) of one row, the lowest among equals."""
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
    """One program per row: its best token; see `write_token`."""
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
    """One program per row and COLUMNS of its distribution; the first one of a row also writes the token."""
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

# type: ignore  (Triton compiles it; no type checker can read it)
"""The noise of `specgraph.ops.noise` in kernels, and the best of scores with it and without.

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

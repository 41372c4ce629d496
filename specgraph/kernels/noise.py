# type: ignore  (Triton compiles it; no type checker can read it)
"""The noise of `specgraph.ops.noise` for kernels, and the best of scores with this noise and without.

Sampling by the Gumbel-max trick needs no more passes over the logits than an argmax: the same pass also gives the parts
of the softmax. It only adds one write of the distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Return SplitMix64's finaliser of x, uint64; see `specgraph.ops.noise`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position, PURPOSE: tl.constexpr):
    """Return the key, uint64, of int64 seed and position and of PURPOSE. Noise is a function of key and index."""
    return mix(mix(mix(seed.to(tl.uint64)) + PURPOSE) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform(key, index):
    """Return the numbers of `specgraph.ops.noise.uniform`, float32 in (0, 1), for uint64 keys and indices."""
    bits = (mix(key + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15) >> 1) | 1
    return tl.minimum(bits.to(tl.int64).to(tl.float32) * 1.0842021724855044e-19, 0.9999999403953552)


@triton.jit
def exponential(key, index):
    """Return exponential noise, -log(1 - uniform), float32 with a relative error of at most 2^-20.

    1 - v loses the precision of a small v, so up to 1 / 16 the series of the logarithm is used.
    """
    v = uniform(key, index)
    series = v + v * v * (0.5 + v * (0.3333333333 + v * (0.25 + v * (0.2 + v * 0.1666666667))))
    return tl.where(v < 0.0625, series, -tl.log(1.0 - v))


@triton.jit
def real_numbers(logits, inside):
    """Return logits with -inf outside and in place of NaN, so that a padded row of garbage still gives a token."""
    return tl.where(inside & (logits == logits), logits, float("-inf"))


@triton.jit
def scaled(logits, temperature):
    """Return logits [ROWS, COLUMNS] / temperature [ROWS]. At temperature 0 they stay as they are."""
    return logits * tl.where(temperature > 0, 1.0 / temperature, 1.0)[:, None]


@triton.jit
def best_of(scores):
    """Return the largest score of each row of [ROWS, COLUMNS], and its column, the lowest among equals."""
    return tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def best_by_gumbel(scores, temperature, seed, position, column):
    """Return the largest key (score + noise) of each row and its column, and the row's part of the softmax.

    The noise depends on seed and position [ROWS] and on column [COLUMNS]. At temperature 0 there is none. It is -log(e)
    with exponential e, so the key is top - log(e * exp(top - score)): one logarithm per element, and no division.

    Returns:
        The largest key and its column, the largest score (top), and the sum of exp(score - top), each [ROWS].
    """
    top = tl.max(scores, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    below = scores - base[:, None]
    number = exponential(noise_key(seed, position, 1)[:, None], column[None, :])
    value, index = best_of(tl.where((temperature > 0)[:, None], -number * tl.exp(-below), scores))
    return tl.where(temperature > 0, base - tl.log(-value), value), index, top, tl.sum(tl.exp(below), axis=1)

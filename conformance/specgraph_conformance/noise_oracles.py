"""The oracle of noise, a function of seed, position and purpose, computed with Python integers modulo 2^64."""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3
"""The purposes of noise; see `specgraph.ops.noise`."""
ALL = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the increment of SplitMix64."""


def mixed(x: int) -> int:
    """Return the finaliser of SplitMix64 for x."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL
    return x ^ (x >> 31)


def unmixed(x: int) -> int:
    """Return the inverse of `mixed` for x."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x ^= x >> shift ^ x >> 2 * shift
        x = x * pow(factor, -1, 1 << 64) & ALL
    return x


def nearest(number: int) -> float:
    """Return number / 2^63 rounded to a float32, ties to even, and below 1."""
    step = 1 << max(number.bit_length() - 24, 0)
    kept, rest = divmod(number, step)
    kept += 2 * rest > step or (2 * rest == step and kept % 2)
    return min(kept * step / (1 << 63), 1 - 2.0**-24)


def uniform(seed: int, position: int, purpose: int, count: int) -> list[float]:
    """Return numbers in (0, 1), of 63 bits rounded to float32. The stream begins at the hash of seed, purpose and
    position."""
    return [number(seed, position, purpose, index) for index in range(count)]


def number(seed: int, position: int, purpose: int, index: int) -> float:
    """Return the number of `uniform` at one index."""
    key = mixed((mixed((mixed(seed & ALL) + purpose) & ALL) + position * GOLDEN) & ALL)
    return nearest(mixed((key + (index + 1) * GOLDEN) & ALL) >> 1 | 1)


def seed_that_draws(number: int, position: int, purpose: int, index: int) -> int:
    """Return the seed with number / 2^63, rounded, at this index. Each part of the hash has an inverse."""
    key = unmixed((unmixed(number << 1) - (index + 1) * GOLDEN) & ALL)
    seed = unmixed((unmixed((key - position * GOLDEN) & ALL) - purpose) & ALL)
    return seed - ((seed >> 63) << 64)


def drawn(logits: Tensor, seed: int, position: int, purpose: int, temperature: float) -> tuple[int, float]:
    """Return the token that the noise picks from softmax(logits / temperature), and its lead, in float64.

    At temperature 0 it is the most likely token.
    """
    keys = logits.double()
    if temperature:
        noise = torch.tensor(uniform(seed, position, purpose, len(logits)), dtype=torch.float64)
        keys = keys / temperature - (-(-noise).log1p()).log()
    best = keys.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])

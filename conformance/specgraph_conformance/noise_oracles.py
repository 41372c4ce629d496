"""The oracle of noise: a function of seed, position and purpose, by 64-bit arithmetic in Python integers."""

from __future__ import annotations

import math

from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3
"""Purposes of noise (`specgraph.ops.noise`)."""
ALL = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the increment of SplitMix64."""
TEMPERATURE = 0.8
"""The temperature of `drawn`."""


def mixed(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: int, count: int) -> list[float]:
    """Numbers in (0, 1) with 23 bits: the stream that begins at the hash of seed, purpose and position."""
    key = mixed((mixed((seed * 4 + purpose) & ALL) + position * GOLDEN) & ALL)
    return [((mixed((key + (index + 1) * GOLDEN) & ALL) >> 41) + 0.5) / (1 << 23) for index in range(count)]


def drawn(logits: Tensor, seed: int, position: int, purpose: int) -> tuple[int, float]:
    """The token that the noise picks from softmax(logits / TEMPERATURE), and by how much it leads, in float64."""
    gumbel = [-math.log(-math.log(u)) for u in uniform(seed, position, purpose, len(logits))]
    keys = sorted(
        ((x / TEMPERATURE + n, token) for token, (x, n) in enumerate(zip(logits.tolist(), gumbel, strict=True)))
    )
    return keys[-1][1], keys[-1][0] - keys[-2][0]

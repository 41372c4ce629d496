"""Random numbers as a function of (seed, position, purpose, index), the same on every device.

A counter-based generator has no state. So a captured graph needs no generator registration, a second run with the same
seed gives the same numbers, and the noise of a position doesn't depend on padding or lowering. The mixing function is
the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT = 1
"""Noise that picks a draft token. It must be independent of the noise that accepts it."""
ACCEPT = 2
"""The uniform number that accepts or rejects a draft token."""
RESAMPLE = 3
"""Noise that picks the token after a rejection, or the bonus token."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right and fill with zeros. It divides: on some devices `>>` copies its number from the host,
    which a capture refuses."""
    return (x // (1 << bits)) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def draft_seeds(seeds: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Write the seeds of drafts that follow texts of these lengths: int64 [R] each.

    Positions behind a rejected draft are drafted again. The text then has another length, so the noise is new. The old
    noise may not be used again: through the drafts' confidences it may have decided which drafts are verified.
    """
    torch.add(seeds, lengths * _GOLDEN, out=out)


def uniform(seeds: Tensor, positions: Tensor, purpose: int, count: int) -> Tensor:
    """Return uniform numbers between 0 and 1. Small ones are as precise as large ones.

    A number is an odd multiple of 2^-63, rounded once, as devices convert an integer to float32: to nearest, ties to
    even. So it has the same bits on every device. A number that would round to 1 is 1 - 2^-24.

    Args:
        seeds, positions: int64 of shapes that broadcast. `positions` has the position of the token to decide.
        purpose: DRAFT, ACCEPT or RESAMPLE.
        count: numbers per position.

    Returns:
        float32 [..., count], from 2^-63 to 1 - 2^-24.
    """
    key = _mix(_mix(_mix(seeds) + purpose) + positions * _GOLDEN)
    index = torch.arange(count, dtype=torch.int64, device=seeds.device)
    bits = _shift(_mix(key[..., None] + (index + 1) * _GOLDEN), 1) | 1
    return (bits.to(torch.float32) * 2.0**-63).clamp(max=1 - 2.0**-24)


def gumbel(seeds: Tensor, positions: Tensor, purpose: int, count: int) -> Tensor:
    """Return standard Gumbel noise, float32 [..., count]; argmax(logits + gumbel) samples softmax(logits).

    It is -log(e) with exponential e = -log(1 - u) and uniform u, so the token with the smallest e / exp(logit) wins. An
    unlikely token wins only with a small e, which is as precise as the small u that it comes from. With e = -log(u) a
    small e would come from u close to 1, and be a multiple of 2^-24.
    """
    return -torch.log(-torch.log1p(-uniform(seeds, positions, purpose, count)))

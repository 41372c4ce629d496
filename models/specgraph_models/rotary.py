"""Rotary position embedding: its parameters, and the table of cosines and sines, which is computed once at load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The base of the rotation's frequencies, and their scaling for contexts longer than the original one."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, llama3, yarn or longrope."""
    factor: float = 1.0
    """Context length over the original context length."""
    original_max_position_embeddings: int = 0
    """llama3, yarn, longrope: the original context length, in positions."""
    low_freq_factor: float = 1.0
    """llama3: if a pair makes fewer turns than this over the original context, `factor` divides its frequency."""
    high_freq_factor: float = 4.0
    """llama3: if a pair makes more turns than this, its frequency is not scaled."""
    beta_fast: float = 32.0
    """yarn: if a pair makes more turns than this over the original context, its frequency is not scaled."""
    beta_slow: float = 1.0
    """yarn: if a pair makes fewer turns than this, `factor` divides its frequency."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies every cosine and sine."""
    truncate: bool = True
    """yarn: the limits are rounded to whole pairs."""
    short_factors: tuple[float, ...] = ()
    """longrope: the divisor of each pair's frequency, in tables of up to the original context length."""
    long_factors: tuple[float, ...] = ()
    """longrope: the divisors in longer tables, for all of their positions."""


def inverse_frequencies(config: RotaryConfig, rotary_dim: int, max_positions: int) -> Tensor:
    """Return the frequency of each of the `rotary_dim // 2` pairs, in radians per position, float32.

    The default is theta ** (-2i / rotary_dim) (RoFormer, arXiv:2104.09864). Linear scaling divides every frequency by
    the factor. Llama 3 (its published configuration) and YaRN (arXiv:2309.00071, section 3.2) divide only slow pairs,
    which make few turns over the original context. Between the two limits both interpolate linearly: Llama 3 over the
    number of turns, YaRN over the pair's index. LongRoPE (arXiv:2402.13753) has a searched divisor for each pair, and
    another set of divisors for tables with `max_positions` above the original context length.
    """
    # float32 as in training: an angle is position times frequency, so a rounding error grows with the position.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    if config.kind == "longrope":
        long = max_positions > config.original_max_position_embeddings
        factors = torch.tensor(config.long_factors if long else config.short_factors, dtype=torch.float32)
        return 1.0 / (factors * config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    keep = _llama3_keep(config, frequencies) if config.kind == "llama3" else _yarn_keep(config, rotary_dim)
    return keep * frequencies + (1 - keep) * frequencies / config.factor


def rotary_table(config: RotaryConfig, max_positions: int, rotary_dim: int, device: torch.device) -> Tensor:
    """Return float32 [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    table = torch.empty(max_positions, rotary_dim)
    cosines, sines = table.chunk(2, dim=1)  # written in place: the table of a long context takes gigabytes
    torch.outer(positions, inverse_frequencies(config, rotary_dim, max_positions), out=cosines)
    torch.sin(cosines, out=sines)
    cosines.cos_()
    return (table if config.attention_factor == 1 else table.mul_(config.attention_factor)).to(device)


def _llama3_keep(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """Return float32 [pairs]: 1 keeps a pair's frequency, 0 divides it by the factor. Between, linear in the turns."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    return ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)


def _yarn_keep(config: RotaryConfig, rotary_dim: int) -> Tensor:
    """Return float32 [pairs]: 1 keeps a pair's frequency, 0 divides it by the factor. Between, linear in the index."""

    def pair_with(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    index = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((index - first) / (last - first or 0.001)).clamp(0, 1)

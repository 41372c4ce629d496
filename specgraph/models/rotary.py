"""The rotary table: cosine and sine of every position and frequency, made once at load."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specgraph.models.config import RotaryConfig


def inverse_frequencies(config: RotaryConfig, rotary_dim: int) -> Tensor:
    """Radians a position for each of the `rotary_dim // 2` pairs, float32.

    Default: theta ** (-2i / rotary_dim) (RoFormer, arXiv:2104.09864). Linear scaling divides them by the factor.
    Llama 3 divides only those whose wavelength is beyond the original context, and blends the band between
    (the `llama3` rope type of Llama 3.1's published configuration).
    """
    # float32 throughout, as the published models were trained: far positions multiply each rounding by their index.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        # How many turns a pair makes over the original context: few turns -> stretch, many turns -> keep.
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / config.factor
    return frequencies


def rotary_table(config: RotaryConfig, max_positions: int, rotary_dim: int, device: torch.device) -> Tensor:
    """float32 [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, rotary_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)

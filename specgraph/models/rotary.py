"""Rotary position embedding: its settings, and the table of cosines and sines, made once at load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.models.config_source import ConfigSource


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Base period, and how frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    factor: float = 1.0
    """How many times longer the context is meant to be."""
    original_max_position_embeddings: int = 0
    """llama3, yarn: positions before stretching."""
    low_freq_factor: float = 1.0
    """llama3: pairs with fewer turns than this over the original context are stretched."""
    high_freq_factor: float = 4.0
    """llama3: pairs with more turns are kept."""
    beta_fast: float = 32.0
    """yarn: pairs with more turns over the original context are kept."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer turns are stretched."""
    attention_factor: float = 1.0
    """yarn: factor on every cosine and sine."""


def rotary_config(source: ConfigSource) -> RotaryConfig:
    """Read `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both in newer files.

    Raises:
        CheckpointError: an unknown kind, or a key that is missing or malformed.
    """
    scaling = source.section("rope_parameters" if source.has("rope_parameters") else "rope_scaling")
    theta = scaling.number("rope_theta", source.number("rope_theta", 10000.0))
    if scaling.has("partial_rotary_factor") and scaling.number("partial_rotary_factor") != 1:
        raise scaling.fail("partial_rotary_factor", "other than 1 is not supported")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return RotaryConfig(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise scaling.fail("rope_type", f"is {kind!r}; supported are default, linear, llama3, yarn")
    factor = scaling.number("factor")
    if kind == "linear":
        return RotaryConfig(theta, kind, factor)
    holder = scaling if scaling.has("original_max_position_embeddings") else source
    original = holder.integer("original_max_position_embeddings", source.integer("max_position_embeddings", 2048))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        return RotaryConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    for key in ("mscale", "mscale_all_dim"):
        if scaling.has(key):
            raise scaling.fail(key, "is not supported with rope_type 'yarn'")
    if scaling.has("truncate") and not scaling.boolean("truncate", True):
        raise scaling.fail("truncate", "false is not supported")
    return RotaryConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def inverse_frequencies(config: RotaryConfig, rotary_dim: int) -> Tensor:
    """Radians a position for each of the `rotary_dim // 2` pairs, float32.

    Default: theta ** (-2i / rotary_dim) (RoFormer, arXiv:2104.09864). Linear scaling divides them by the factor.
    Llama 3 (its published configuration) and YaRN (arXiv:2309.00071, section 3.2) divide the slow pairs only: those
    that make few turns over the original context. In between, Llama 3 blends along the turns, YaRN along the index.
    """
    # float32 throughout, as the published models were trained: far positions multiply each rounding by their index.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    keep = _llama3_keep(config, frequencies) if config.kind == "llama3" else _yarn_keep(config, rotary_dim)
    return keep * frequencies + (1 - keep) * frequencies / config.factor


def rotary_table(config: RotaryConfig, max_positions: int, rotary_dim: int, device: torch.device) -> Tensor:
    """float32 [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, rotary_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table if config.attention_factor == 1 else table * config.attention_factor).to(device)


def _llama3_keep(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """1 for pairs that are kept, 0 for stretched ones, linear in the turns between."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    return ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)


def _yarn_keep(config: RotaryConfig, rotary_dim: int) -> Tensor:
    """1 for pairs that are kept, 0 for stretched ones, linear in the pair's index between."""

    def pair_with(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    first = max(math.floor(pair_with(config.beta_fast)), 0)
    last = min(math.ceil(pair_with(config.beta_slow)), rotary_dim - 1)
    index = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((index - first) / max(last - first, 0.001)).clamp(0, 1)

"""Reads rotary embedding from config.json, in its older and newer keys."""

from __future__ import annotations

import logging
import math

from specgraph_models.checkpoints.config_source import ConfigSource, holder_of
from specgraph_models.checkpoints.files import shown
from specgraph_models.rotary import RotaryConfig

_LOG = logging.getLogger("specgraph")

ORIGINAL = "original_max_position_embeddings"


def rotary_config(source: ConfigSource) -> RotaryConfig:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which has both in newer files.

    An original length at the top level counts before the section's, as in transformers.
    """
    old, new = source.section("rope_scaling"), source.section("rope_parameters")
    if old.values and new.values and old.values != new.values:
        raise source.fail("rope_parameters", "and 'rope_scaling' are both there and differ; keep the right one")
    scaling = new if new.values else old
    if scaling is new:
        old.taken.update(old.values)  # the same values
    longest = source.integer("max_position_embeddings", 2048)
    original = source.integer(ORIGINAL, scaling.integer(ORIGINAL, longest))
    return _read(scaling, source.number("rope_theta", 10000.0), longest, original)


def rotary_by_kind(source: ConfigSource) -> tuple[RotaryConfig, RotaryConfig]:
    """Return the rotation of layers with full attention and that of sliding layers (Gemma 3: they differ).

    Newer files have both in `rope_parameters`. In older files `rope_scaling` is for full attention. If a section has no
    `rope_theta`, the top level's `rope_theta` or `rope_local_base_freq` counts.
    """
    longest = source.integer("max_position_embeddings", 2048)

    def read(scaling: ConfigSource, theta: float) -> RotaryConfig:
        return _read(scaling, theta, longest, scaling.integer(ORIGINAL, longest))

    new = source.section("rope_parameters")
    old = source.section("rope_scaling")
    theta, local = source.number("rope_theta", 1e6), source.number("rope_local_base_freq", 1e4)
    if "full_attention" in new.values:
        if old.values:
            raise source.fail("rope_parameters", "and 'rope_scaling' are both there; keep the right one")
        return read(new.section("full_attention"), theta), read(new.section("sliding_attention"), local)
    if old.has("type") and not old.has("rope_type"):
        raise old.fail("type", "is an older name that transformers leaves unread here; give it as 'rope_type'")
    return read(old, theta), RotaryConfig(local)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's factor on attention for a context `factor` times as long. `mscale` is DeepSeek's weight of it."""
    return 0.1 * mscale * math.log(factor) + 1.0


def latent_scale(source: ConfigSource) -> float:
    """Return the factor on a latent attention's scores, which follows from `mscale_all_dim`. 1 without yarn."""
    scaling = source.section("rope_parameters" if source.section("rope_parameters").values else "rope_scaling")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    all_dim = scaling.number("mscale_all_dim", 0.0)
    return yarn_mscale(scaling.number("factor"), all_dim) ** 2 if all_dim and kind != "default" else 1.0


def partial_rotary_factor(source: ConfigSource) -> float:
    """Return the share of each head that is rotated, from a rope section or the top level."""
    key = "partial_rotary_factor"
    section = holder_of(key, source.section("rope_scaling"), source.section("rope_parameters"))
    return section.number(key, source.number(key, 1.0))


def scaled_from(source: ConfigSource) -> int | None:
    """Return the first position with scaled queries (Ministral 3): they grow with the logarithm of the position.

    None if no query is scaled.
    """
    section = source.section("rope_parameters" if source.section("rope_parameters").values else "rope_scaling")
    section.taken.add("max_position_embeddings")  # a copy of the top level's
    return section.integer(ORIGINAL) if section.number("llama_4_scaling_beta", 0.0) else None


def _read(scaling: ConfigSource, default_theta: float, longest: int, original: int) -> RotaryConfig:
    """Return the rotation that a section describes.

    Args:
        longest, original: the context length now, and before scaling.
    """
    scaling.taken.update(("rope_type", "type", "finetuned"))
    theta = scaling.number("rope_theta", default_theta)
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return RotaryConfig(theta)
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        raise scaling.fail("rope_type", f"is {shown(kind)}; supported are default, linear, llama3, yarn, longrope")
    if kind == "linear":
        return RotaryConfig(theta, kind, scaling.number("factor"))
    if kind == "longrope":
        return _longrope(scaling, theta, original, longest)
    factor = scaling.number("factor")
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.fail("low_freq_factor", f"is {low:g}, it should be below 'high_freq_factor', {high:g}")
        return RotaryConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if slow > fast:  # both are 1 in Kimi-K2
        raise scaling.fail("beta_slow", f"is {slow:g}, it should be at most 'beta_fast', {fast:g}")
    if theta == 1:
        raise scaling.fail("rope_theta", "is 1; 'yarn' needs a larger one")
    default = yarn_mscale(factor, 1.0)
    mscale, mscale_all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        default = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    if scaling.has("attn_factor"):
        default *= scaling.number("attn_factor")
        if scaling.has("attention_factor"):
            raise scaling.fail("attn_factor", "multiplies a default that 'attention_factor' replaces; keep one of them")
        _LOG.warning("%s: cosines and sines are multiplied by %g, attn_factor times YaRN's factor, as in vLLM; "
                     "transformers leaves that key out: see docs/checkpoints.md", scaling.name, default)  # fmt: skip
    return RotaryConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.number("attention_factor", default),
        truncate=scaling.boolean("truncate", True),
    )


def _longrope(scaling: ConfigSource, theta: float, original: int, longest: int) -> RotaryConfig:
    factor = scaling.number("factor", max(1.0, longest / original))
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    short, long = (scaling.numbers(f"{name}_factor") for name in ("short", "long"))
    if len(short) != len(long) or not short:
        raise scaling.fail(
            "long_factor", f"has {len(long)} entries, 'short_factor' {len(short)}; one per pair is needed"
        )
    return RotaryConfig(
        theta,
        "longrope",
        factor,
        original,
        attention_factor=scaling.number("attention_factor", default),
        short_factors=short,
        long_factors=long,
    )

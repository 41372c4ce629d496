"""The sizes of a Llama-shaped decoder, read from the keys of a Hugging Face config.json."""

from __future__ import annotations

import math

import torch

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.experts import experts_config
from specgraph.checkpoints.files import shown
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.models.rotary import RotaryConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Values of `model_type` that `model_config` reads."""

_WINDOW_BY_LAYER = ("qwen2", "qwen3")
"""Architectures in which only some layers have the sliding window."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def model_config(source: ConfigSource, default_architecture: str | None = None) -> ModelConfig:
    """Read the sizes of a Llama-shaped decoder.

    Args:
        source: the configuration.
        default_architecture: used when `model_type` is absent or not one of ARCHITECTURES (drafters' folders hold
            names of their own there).

    Raises:
        CheckpointError: unknown architecture, or a key that is missing, malformed or unsupported.
    """
    architecture = source.string("model_type", default_architecture)
    if architecture not in ARCHITECTURES:
        if default_architecture is None:
            raise source.fail("model_type", f"is {shown(architecture)}; supported are {', '.join(ARCHITECTURES)}")
        architecture = default_architecture
    activation = source.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise source.fail("hidden_act", f"is {shown(activation)}; only 'silu' is supported")
    hidden_size = source.integer("hidden_size")
    num_heads = source.integer("num_attention_heads")
    num_kv_heads = source.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise source.fail("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} query heads")
    if not source.has("head_dim") and hidden_size % num_heads:
        raise source.fail("hidden_size", f"is {hidden_size}, not a multiple of the {num_heads} attention heads")
    head_dim = source.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2 or not head_dim:
        raise source.fail("head_dim", f"is {head_dim}; rotary embedding needs an even number")
    attention_bias = source.boolean("attention_bias", False)
    num_layers = source.integer("num_hidden_layers")
    window, sliding = _sliding_layers(source, architecture, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        max_position_embeddings=source.integer("max_position_embeddings", 2048),
        tie_word_embeddings=source.boolean("tie_word_embeddings", False),
        dtype=config_dtype(source),
        sliding_window=window,
        sliding=sliding,
        rotary=rotary_config(source),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=source.boolean("mlp_bias", False),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        experts=experts_config(source, architecture, num_layers),
    )


def require_full_attention(config: ModelConfig, name: str) -> None:
    """Raise CheckpointError if a sliding window would hide any of the model's positions. `name`: the config's file.

    For heads whose attention is not causal, and for MTP modules, of which no source says which layers have a window.
    """
    if any(config.window(layer) is not None for layer in range(config.num_layers)):
        raise CheckpointError(
            f"{name}: 'sliding_window' is {config.sliding_window}, and this kind of drafter has full attention only; "
            f"load the target with max_model_len={config.sliding_window} or less, where the two are the same"
        )


def rotary_config(source: ConfigSource) -> RotaryConfig:
    """Read `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both in newer files.

    Raises:
        CheckpointError: an unknown kind, or a key that is missing, malformed or unknown.
    """
    old, new = source.section("rope_scaling"), source.section("rope_parameters")
    if old.values and new.values and old.values != new.values:
        raise source.fail("rope_parameters", "and 'rope_scaling' are both there and differ; keep the right one")
    scaling = new if new.values else old
    if scaling is new:
        old.taken.update(old.values)  # the same values
    scaling.taken.update(("rope_type", "type", "finetuned"))
    theta = scaling.number("rope_theta", source.number("rope_theta", 10000.0))
    for key in ("mscale", "mscale_all_dim"):
        if scaling.has(key):
            raise scaling.fail(key, "is not supported")
    scaling.require({"truncate": True})
    if scaling.number("partial_rotary_factor", 1.0) != 1:
        raise scaling.fail("partial_rotary_factor", "other than 1 is not supported")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return RotaryConfig(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise scaling.fail("rope_type", f"is {shown(kind)}; supported are default, linear, llama3, yarn")
    factor = scaling.number("factor")
    if kind == "linear":
        scaling.taken.add("original_max_position_embeddings")  # for people: linear scaling does not use it
        return RotaryConfig(theta, kind, factor)
    holder = scaling if scaling.has("original_max_position_embeddings") else source
    original = holder.integer("original_max_position_embeddings", source.integer("max_position_embeddings", 2048))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.fail("low_freq_factor", f"is {low:g}, it should be below 'high_freq_factor', {high:g}")
        return RotaryConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if slow >= fast:
        raise scaling.fail("beta_slow", f"is {slow:g}, it should be below 'beta_fast', {fast:g}")
    if theta == 1:
        raise scaling.fail("rope_theta", "is 1; 'yarn' needs a larger one")
    default = 0.1 * math.log(factor) + 1.0
    return RotaryConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.number("attention_factor", default),
    )


def _sliding_layers(source: ConfigSource, architecture: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window and, for each layer, whether it has it.

    `layer_types` says it by layer. Without it the window is in every layer (Mistral), in those from `max_window_layers`
    on (Qwen2 and Qwen3, and only with `use_sliding_window`), or, for Llama, in none: transformers and vLLM leave the
    key unread there.
    """
    window = source.integer("sliding_window") if source.has("sliding_window") else None
    if "qwen" in architecture and not source.boolean("use_sliding_window", False):
        window = None
    types = source.strings("layer_types")
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise source.fail("layer_types", f"has {shown(others)}; 'full_attention' and 'sliding_attention' are supported")
    if "sliding_attention" in types:
        if window is None:
            raise source.fail("layer_types", "has sliding_attention, and 'sliding_window' does not say how long")
        if len(types) != num_layers:
            raise source.fail("layer_types", f"has {len(types)} entries for {num_layers} layers")
        return window, tuple(kind == "sliding_attention" for kind in types)
    if window is None or architecture == "llama" or (types and architecture in _WINDOW_BY_LAYER):
        return None, ()
    if types:
        raise source.fail(
            "layer_types", f"has full attention only, and 'sliding_window' is {window}; keep the right one"
        )
    first = source.integer("max_window_layers", 28) if architecture in _WINDOW_BY_LAYER else 0
    return window, tuple(layer >= first for layer in range(num_layers))


def config_dtype(source: ConfigSource) -> torch.dtype:
    """`dtype`, or `torch_dtype` in older files; float32 when there is none.

    Raises:
        CheckpointError: not a plain floating-point type.
    """
    key = "dtype" if source.has("dtype") else "torch_dtype"
    name = source.string(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise source.fail(key, f"is {shown(name)}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]

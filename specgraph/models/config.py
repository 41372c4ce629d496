"""What `config.json` of a Hugging Face folder says about a model, as typed values.

Only what the models here read. A key that is missing, of the wrong type or out of range raises one CheckpointError that
names the key and the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specgraph.errors import CheckpointError

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The key-value pairs of one configuration, and the file (and section) that they came from."""

    values: Mapping[str, Any]
    name: str
    """For messages: the file's path, with the section inside it."""

    def fail(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about `key`."""
        return CheckpointError(f"{self.name}: {key!r} {problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def section(self, key: str) -> ConfigSource:
        """The mapping stored under `key`; empty when absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"should be a mapping, is {value!r}")
        return ConfigSource(value, f"{self.name}[{key}]")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be an integer")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"should be an integer, is {value!r}")
        if value < minimum:
            raise self.fail(key, f"should be at least {minimum}, is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be a number")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"should be a number, is {value!r}")
        if value <= 0:
            raise self.fail(key, f"should be positive, is {value}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"should be true or false, is {value!r}")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing; it should be a string")
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"should be a string, is {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.fail(key, f"should be a list of integers, is {value!r}")
        return tuple(value)


def read_config(folder: Path) -> ConfigSource:
    """The contents of `folder/config.json`.

    Raises:
        CheckpointError: no such folder or file, or not a JSON mapping.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json and the weights")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise CheckpointError(f"{folder} has no config.json (it holds: {there})") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} should hold a JSON object, holds {type(values).__name__}")
    return ConfigSource(values, str(path))


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary position embedding: base period, and how frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder: sizes, rotation, and which optional tensors its layers have."""

    architecture: str
    """`model_type` of the configuration: llama, mistral, qwen2, qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    """What the checkpoint says its weights are; float32 when it says nothing."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""

    def with_max_position(self, max_position_embeddings: int) -> ModelConfig:
        """The same model with another number of positions."""
        return replace(self, max_position_embeddings=max_position_embeddings)


ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that `model_config` reads."""


def model_config(source: ConfigSource, default_architecture: str | None = None) -> ModelConfig:
    """Read the sizes of a Llama-shaped decoder.

    Args:
        source: the configuration.
        default_architecture: taken when `model_type` is absent or not one of ours (drafter folders name all sorts).

    Raises:
        CheckpointError: unknown architecture, or a key that is missing, malformed or unsupported.
    """
    architecture = source.string("model_type", default_architecture)
    if architecture not in ARCHITECTURES:
        if default_architecture is None:
            raise source.fail("model_type", f"is {architecture!r}; supported are {', '.join(ARCHITECTURES)}")
        architecture = default_architecture
    activation = source.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise source.fail("hidden_act", f"is {activation!r}; only 'silu' is supported")
    if source.has("sliding_window") and source.boolean("use_sliding_window", architecture != "qwen3"):
        window, length = source.integer("sliding_window"), source.integer("max_position_embeddings")
        if window < length:
            raise source.fail("sliding_window", f"is {window}, below max_position_embeddings {length}: not supported")
    layer_types = source.values.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise source.fail("layer_types", f"has {sorted(set(layer_types))}; only 'full_attention' is supported")
    hidden_size = source.integer("hidden_size")
    num_heads = source.integer("num_attention_heads")
    num_kv_heads = source.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise source.fail("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} query heads")
    if not source.has("head_dim") and hidden_size % num_heads:
        raise source.fail("hidden_size", f"is {hidden_size}, not a multiple of the {num_heads} attention heads")
    head_dim = source.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise source.fail("head_dim", f"is {head_dim}; rotary embedding needs an even number")
    attention_bias = source.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size"),
        num_layers=source.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        max_position_embeddings=source.integer("max_position_embeddings", 2048),
        tie_word_embeddings=source.boolean("tie_word_embeddings", False),
        dtype=_dtype(source),
        rotary=rotary_config(source),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=source.boolean("mlp_bias", False),
        qk_norm=architecture == "qwen3",
    )


def rotary_config(source: ConfigSource) -> RotaryConfig:
    """Read `rope_theta` with `rope_scaling`, or `rope_parameters`, which holds both in newer files."""
    scaling = source.section("rope_parameters" if source.has("rope_parameters") else "rope_scaling")
    theta = scaling.number("rope_theta", source.number("rope_theta", 10000.0))
    if "partial_rotary_factor" in scaling.values and scaling.number("partial_rotary_factor") != 1:
        raise scaling.fail("partial_rotary_factor", "below 1 is not supported")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return RotaryConfig(theta)
    if kind == "linear":
        return RotaryConfig(theta, kind, factor=scaling.number("factor"))
    if kind == "llama3":
        length = scaling.values.get("original_max_position_embeddings")
        return RotaryConfig(
            theta,
            kind,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position_embeddings=scaling.integer("original_max_position_embeddings")
            if length is not None
            else source.integer("max_position_embeddings"),
        )
    raise scaling.fail("rope_type", f"is {kind!r}; supported are default, linear, llama3")


def refuse_quantised(source: ConfigSource) -> None:
    """Raise when the configuration says that the weights are quantised: only plain floating point is read here."""
    for key in ("quantization_config", "compression_config"):
        if source.has(key):
            section = source.section(key)
            method = section.values.get("quant_method") or section.values.get("format") or "an unnamed method"
            raise source.fail(key, f"says the weights are quantised by {method}; give an unquantised checkpoint")


def _dtype(source: ConfigSource) -> torch.dtype:
    key = "dtype" if source.has("dtype") else "torch_dtype"
    name = source.string(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise source.fail(key, f"is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]

"""What the models here need to know of a Llama-shaped decoder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from specgraph.errors import CheckpointError
from specgraph.models.config_source import ConfigSource
from specgraph.models.rotary import RotaryConfig, rotary_config

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    sliding_window: int | None = None
    """Positions that attention looks back; None for all. The models here have full attention only."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""

    def with_max_position(self, max_position_embeddings: int) -> ModelConfig:
        """The same model with another number of positions."""
        return replace(self, max_position_embeddings=max_position_embeddings)

    def require_full_attention(self, name: str) -> None:
        """Raise CheckpointError (`name` is the file's) if a sliding window would show within the positions."""
        if self.sliding_window is not None and self.sliding_window < self.max_position_embeddings:
            raise CheckpointError(
                f"{name}: 'sliding_window' is {self.sliding_window}, and only full attention is supported; "
                f"load the target with max_model_len={self.sliding_window} or less, where the two are the same"
            )


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
        sliding_window=_sliding_window(source, architecture),
        rotary=rotary_config(source),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=source.boolean("mlp_bias", False),
        qk_norm=architecture == "qwen3",
    )


def _sliding_window(source: ConfigSource, architecture: str) -> int | None:
    """Qwen configurations hold a window that is off unless `use_sliding_window` says otherwise."""
    if not source.has("sliding_window") or not source.boolean("use_sliding_window", "qwen" not in architecture):
        return None
    return source.integer("sliding_window")


def _dtype(source: ConfigSource) -> torch.dtype:
    key = "dtype" if source.has("dtype") else "torch_dtype"
    name = source.string(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise source.fail(key, f"is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]

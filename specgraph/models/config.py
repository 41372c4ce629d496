"""Sizes and options of a Llama-shaped decoder: what targets and draft heads are built from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from specgraph.models.rotary import RotaryConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder: sizes, rotation, and which optional tensors its layers have."""

    architecture: str
    """`model_type` of the checkpoint's config.json: llama, mistral, qwen2 or qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Positions that the model runs with: rows of the rotary table."""
    tie_word_embeddings: bool
    dtype: torch.dtype
    """Dtype of the weights as the checkpoint states it; float32 when it states none."""
    sliding_window: int | None = None
    """Positions before its own that a row attends to; None for all. These models compute full attention only, so a
    checkpoint whose window is shorter than `max_position_embeddings` is refused when it is loaded."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""

    def with_max_position(self, max_position_embeddings: int) -> ModelConfig:
        """The same configuration with another number of positions."""
        return replace(self, max_position_embeddings=max_position_embeddings)

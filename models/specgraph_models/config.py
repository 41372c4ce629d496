"""Sizes and options of a Llama-shaped decoder: what targets and draft heads are built from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from specgraph.parallel import WHOLE, ContextParallel, TensorParallel
from specgraph_models.experts import ExpertsConfig
from specgraph_models.latent import LatentConfig
from specgraph_models.rotary import RotaryConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder: sizes, rotation, and which optional tensors its layers have."""

    architecture: str
    """`model_type` of the checkpoint's config.json; see `specgraph_models.checkpoints.architectures.ARCHITECTURES`."""
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
    """Keys that a row of a sliding layer sees at most, its own included."""
    sliding: tuple[bool, ...] = ()
    """Layers with the sliding window, a flag for each; empty: none has it."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    sliding_rotary: RotaryConfig | None = None
    """Rotation of the sliding layers where it differs (Gemma 3)."""
    rotary_dim: int | None = None
    """Leading elements of each head that are rotated; all when None."""
    attention_scale: float | None = None
    """Factor on query-key products; head_dim ** -0.5 when None."""
    sinks: bool = False
    """Each layer has attention sinks (gpt-oss)."""
    activation: Activation = "silu"
    """Columns of the gated MLP."""
    embedding_scale: float = 1.0
    """Factor on the embedding (Gemma 3)."""
    norm_offset: float = 0.0
    """Added to each norm's weight when it is loaded (Gemma 3 stores weights minus 1)."""
    output_norms: bool = False
    """Attention and MLP are normalised once more before they join the residual stream (Gemma 3)."""
    packed_projections: bool = False
    """The checkpoint holds query, key and value in one matrix, and gate and up in another (Phi-3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""
    output_gate: bool = False
    """The attention's output is multiplied by a gate of each element, made beside the query (Qwen3-Next)."""
    experts: ExpertsConfig | None = None
    """The mixture of experts that some layers have in place of their MLP."""
    latent: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek-V3): num_kv_heads is 1, and head_dim the rotated part and the latent."""
    tensor_parallel: TensorParallel = WHOLE
    """The split of the model over ranks; all sizes here are those of the whole model."""

    @property
    def attention_parallel(self) -> TensorParallel:
        """The ranks that split the attention's heads; a checkpoint's latent attention is whole on every rank."""
        return self.tensor_parallel if self.latent is None or self.latent.splits_heads else WHOLE

    @property
    def context(self) -> ContextParallel | None:
        """The ranks that share the keys of every request, if any."""
        ranks = self.tensor_parallel.context
        return None if ranks is None else replace(ranks, gathers_heads=self.attention_parallel.size > 1)

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.num_heads // self.attention_parallel.size

    @property
    def local_kv_heads(self) -> int:
        """KV heads of this rank: at least one."""
        begin, end = self.attention_parallel.kv_heads(self.num_kv_heads)
        return end - begin

    def window(self, layer: int) -> int | None:
        """Keys that a row sees at most in that layer; None where the window hides none of the model's positions."""
        if self.sliding_window is None or not any(self.sliding[layer : layer + 1]):
            return None
        return self.sliding_window if self.sliding_window < self.max_position_embeddings else None

    def with_max_position(self, max_position_embeddings: int) -> ModelConfig:
        """Return the same configuration with another number of positions."""
        return replace(self, max_position_embeddings=max_position_embeddings)

    def split(self, ranks: TensorParallel) -> ModelConfig:
        """Return the same configuration, split over `ranks`; ConfigError where sizes cannot be split evenly."""
        if self.experts is not None:
            ranks.check_experts(self.experts.num_experts, self.experts.inner)
        if ranks.size == 1:
            return replace(self, tensor_parallel=ranks)
        heads = (self.num_heads, self.num_kv_heads) if self.latent is None else None
        ranks.check(heads, self.intermediate_size, f"the {self.architecture} model")
        return replace(self, tensor_parallel=ranks)

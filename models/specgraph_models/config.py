"""Sizes and options of a Llama-shaped model. Targets and draft heads are built from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from specgraph.errors import ConfigError
from specgraph.parallel import ContextParallel
from specgraph_models.delta import DeltaConfig
from specgraph_models.experts import ExpertsConfig
from specgraph_models.latent import LatentConfig
from specgraph_models.parallel import WHOLE, TensorParallel
from specgraph_models.rotary import RotaryConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a Llama-shaped model, its rotation, and the optional tensors of its layers."""

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
    """The number of positions that the model runs with, and of rows in its rotary table."""
    tie_word_embeddings: bool
    dtype: torch.dtype
    """Dtype of the weights as the checkpoint states it, or float32 if it states none."""
    sliding_window: int | None = None
    """The most keys that a row of a sliding layer sees, its own included."""
    sliding: tuple[bool, ...] = ()
    """A flag per layer: whether it has the sliding window. Empty if no layer has it."""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    sliding_rotary: RotaryConfig | None = None
    """The rotation of the sliding layers (Gemma 3). None if it is `rotary`."""
    rotary_dim: int | None = None
    """The number of leading elements of each head that are rotated. None if all are."""
    attention_scale: float | None = None
    """Factor on query-key products. None means head_dim ** -0.5."""
    sinks: bool = False
    """Each layer has attention sinks (gpt-oss)."""
    activation: Activation = "silu"
    """The activation of the gated MLP's gate."""
    embedding_scale: float = 1.0
    """Factor on the embedding (Gemma 3)."""
    norm_offset: float = 0.0
    """Added to each norm's weight in float32 when it is loaded (Gemma 3 stores weights minus 1)."""
    output_norms: bool = False
    """The outputs of attention and MLP are normalised before they are added to the residual stream (Gemma 3)."""
    packed_projections: bool = False
    """The checkpoint holds query, key and value in one matrix, and gate and up in another (Phi-3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""
    whole_qk_norm: bool = False
    """RMS norm of all query heads at once, and of all key heads, before rotation (MiniMax-M2)."""
    unscaled_positions: int | None = None
    """The number of first positions whose queries are not scaled by position (Ministral 3). None if none is scaled."""
    output_gate: bool = False
    """A gate per element multiplies the attention's output. The query projection also makes the gate (Qwen3-Next)."""
    experts: ExpertsConfig | None = None
    """The mixture of experts that some layers have in place of their MLP."""
    latent: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek-V3). num_kv_heads is then 1, and head_dim is the size of the rotated part
    plus the latent."""
    delta: DeltaConfig | None = None
    """The gated delta net of recurrent layers (Qwen3-Next). None if every layer has attention."""
    recurrent: tuple[bool, ...] = ()
    """A flag per layer: whether it is recurrent. Empty if no layer is."""
    tensor_parallel: TensorParallel = WHOLE
    """The split of the model over ranks. All sizes here are of the whole model."""

    @property
    def attention_parallel(self) -> TensorParallel:
        """The ranks that split the attention's heads. Latent attention from a checkpoint is whole on every rank."""
        return self.tensor_parallel if self.latent is None or self.latent.splits_heads else WHOLE

    @property
    def context(self) -> ContextParallel | None:
        """The ranks that share the keys of every request. None if no ranks do."""
        ranks = self.tensor_parallel.context
        return None if ranks is None else replace(ranks, gathers_heads=self.attention_parallel.size > 1)

    @property
    def local_heads(self) -> int:
        """The number of this rank's query heads."""
        return self.num_heads // self.attention_parallel.size

    @property
    def local_kv_heads(self) -> int:
        """The number of this rank's KV heads, at least one."""
        begin, end = self.attention_parallel.kv_heads(self.num_kv_heads)
        return end - begin

    def window(self, layer: int) -> int | None:
        """Return the most keys that a row sees in that layer. None if it sees every position of the model."""
        if self.sliding_window is None or not any(self.sliding[layer : layer + 1]):
            return None
        return self.sliding_window if self.sliding_window < self.max_position_embeddings else None

    def with_max_position(self, max_position_embeddings: int) -> ModelConfig:
        """Return the same configuration with another number of positions."""
        return replace(self, max_position_embeddings=max_position_embeddings)

    def split(self, ranks: TensorParallel) -> ModelConfig:
        """Return the same configuration, split over `ranks`. Raises ConfigError if a size cannot be split evenly."""
        if self.experts is not None:
            ranks.check_experts(self.experts.num_experts, self.experts.inner)
        if ranks.size == 1:
            return replace(self, tensor_parallel=ranks)
        if self.whole_qk_norm:
            raise ConfigError(
                f"tensor parallel over {ranks.size} ranks: the {self.architecture} model normalises all heads at once, "
                "which ranks with some heads each cannot; use one rank, or expert parallel with data parallel ranks"
            )
        if self.delta is not None:
            raise ConfigError(
                f"tensor parallel over {ranks.size} ranks: the {self.architecture} model has recurrent layers, whose "
                "states are not split over ranks here; use one rank, or expert parallel with data parallel ranks"
            )
        heads = (self.num_heads, self.num_kv_heads) if self.latent is None else None
        ranks.check(heads, self.intermediate_size, f"the {self.architecture} model")
        return replace(self, tensor_parallel=ranks)

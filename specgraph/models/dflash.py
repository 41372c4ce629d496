"""The DFlash draft head: fills a block of mask tokens in one non-causal pass over context made from target states.

context   = hidden_norm(fc(cat(aux hidden states of the target)))    once per target row
K, V      of every layer: from `context` for rows before the block, from the layer's own input for the block's rows
block     = embed(sampled token, mask, mask, ...)                    through all layers, attention not causal
logits    = lm_head(norm(block))                                     row j predicts the token at its own position
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, Store
from specgraph.models.config import ModelConfig
from specgraph.models.layers import (
    DecoderLayer,
    attention_layers,
    decoder_blocks,
    rms_norm,
    shortened,
)
from specgraph.models.protocol import HeadKind, OutputProjection
from specgraph.models.split import embedding, whole_logits
from specgraph.ops.linear import PairInput, Weight


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes of the decoder layers, the block, and which target states the head takes."""

    model: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    """Rows of a block: the sampled token and K masks."""
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """Tensors of a head beside its decoder layers."""

    embed_tokens: Tensor
    """[vocab_size, hidden_size]: the target's."""
    fc: Weight
    """[hidden_size, aux_size]"""
    hidden_norm: Tensor
    """[hidden_size]"""
    norm: Tensor
    """[hidden_size]"""
    lm_head: Tensor
    """[draft_vocab_size, hidden_size]"""
    draft_to_target: Tensor | None


def in_one_tensor(layers: Sequence[DecoderLayer]) -> tuple[tuple[DecoderLayer, ...], Tensor | None]:
    """Put the layers' packed projections into one tensor, so that one product makes all layers' context.

    Returns:
        The layers, whose `qkv` are views of the tensor; and the tensor [num_layers, rows, hidden_size]. Where a
        projection has a bias or is FP8 the layers are as they were, and the tensor is None.
    """
    if any(layer.qkv.bias is not None or layer.qkv.scale is not None for layer in layers):
        return tuple(layers), None
    packed = torch.stack([layer.qkv.matrix for layer in layers])
    return tuple(replace(layer, qkv=Weight(own)) for layer, own in zip(layers, packed.unbind(), strict=True)), packed


class DFlashHead:
    """A DFlash drafter. Implements `ParallelHead`."""

    kind: HeadKind = "parallel"
    pair_input: PairInput | None = None

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, layers: Sequence[DecoderLayer]) -> None:
        self.config = config
        self.tensors = weights
        self.layers, self._qkv = in_one_tensor(layers)
        model = config.model
        self.attention_layers = attention_layers(model, len(layers), weights.embed_tokens.device, causal=False)
        self.max_speculative_tokens, self.mask_token_id = config.block_size - 1, config.mask_token_id
        self.hidden_size, self.draft_vocab_size = model.hidden_size, config.draft_vocab_size
        self.aux_layers = config.aux_layers
        self.aux_size = len(config.aux_layers) * config.target_hidden_size
        self.tensor_parallel = model.tensor_parallel
        self.dtype, self.draft_to_target = weights.embed_tokens.dtype, weights.draft_to_target

    def shorten(self, max_model_len: int) -> None:
        """See `LlamaTarget.shorten`."""
        model = self.config.model.with_max_position(max_model_len)
        self.config = replace(self.config, model=model)
        self.attention_layers = shortened(self.attention_layers, model, self.tensors.embed_tokens.device)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]."""
        combined = ops.norm_linear(aux_hidden, None, self.tensors.fc)
        return rms_norm(combined, self.tensors.hidden_norm, self.config.model.rms_norm_eps)

    def store_context(self, context: Tensor, store: Store) -> None:
        """context [T, hidden_size]: store each layer's keys and values of these rows."""
        eps = self.config.model.rms_norm_eps
        for index, (packed, layer, shape) in enumerate(
            zip(self._context_kv(context), self.layers, self.attention_layers, strict=True)
        ):
            key, value = packed.chunk(2, dim=-1)
            key = key.view(-1, shape.num_kv_heads, shape.head_dim)
            if layer.key_norm is not None:
                key = rms_norm(key, layer.key_norm, eps)
            store(index, key, value.view(-1, shape.num_kv_heads, shape.head_dim))

    def _context_kv(self, context: Tensor) -> Sequence[Tensor]:
        """Return each layer's keys, then values, of context [T, hidden_size]: [T, 2 * num_kv_heads * head_dim]."""
        shape = self.attention_layers[0]
        skip = shape.num_heads * shape.head_dim  # the query's rows of a packed projection
        if self._qkv is not None:
            weights = self._qkv[:, skip:].transpose(1, 2)
            return torch.bmm(context.expand(len(self.layers), *context.shape), weights).unbind()
        return [ops.norm_linear(context, None, layer.qkv.rows_from(skip)) for layer in self.layers]

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids int64 [R * (1 + K)] -> [R * (1 + K), hidden_size]."""
        eps = self.config.model.rms_norm_eps
        x = embedding(token_ids, self.tensors.embed_tokens, self.tensor_parallel, self.config.model.vocab_size)
        # The final norm is part of `logits`, where it is fused with the projection.
        return decoder_blocks(x, self.layers, self.attention_layers, attend, eps)[-1]

    @property
    def projection(self) -> OutputProjection | None:
        """See `Head.projection`."""
        return self._output

    @property
    def _output(self) -> OutputProjection:
        tensors, eps = self.tensors, self.config.model.rms_norm_eps
        return OutputProjection(tensors.norm, eps, tensors.lm_head, self.draft_vocab_size, self.tensor_parallel)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, draft_vocab_size]."""
        return whole_logits(self._output.logits(hidden), self.tensor_parallel, self.draft_vocab_size)

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that the head reads, the rotary table and the vocabulary offsets too."""
        tensors = self.tensors
        named: dict[str, Tensor] = {
            "embed_tokens": tensors.embed_tokens,
            **tensors.fc.named_tensors("fc"),
            "hidden_norm": tensors.hidden_norm,
            "norm": tensors.norm,
            "lm_head": tensors.lm_head,
        }
        optional = {
            "draft_to_target": tensors.draft_to_target,
            "rotary": self.attention_layers[0].rotary,
        }
        named.update({name: tensor for name, tensor in optional.items() if tensor is not None})
        for index, layer in enumerate(self.layers):
            named.update(layer.named_tensors(f"layers.{index}"))
        return named

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
from specgraph.models.decoder import DecoderModel, named_tensors
from specgraph.models.layers import DecoderLayer, rms_norm
from specgraph.models.protocol import HeadKind
from specgraph.models.split import embedding
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


class DFlashHead(DecoderModel):
    """A DFlash drafter. Implements `ParallelHead`."""

    kind: HeadKind = "parallel"
    pair_input: PairInput | None = None

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, layers: Sequence[DecoderLayer]) -> None:
        own, self._qkv = in_one_tensor(layers)
        super().__init__(
            config.model, weights.embed_tokens, own, weights.lm_head, output_norm=weights.norm, causal=False
        )
        self.config, self.tensors = config, weights
        self.max_speculative_tokens, self.mask_token_id = config.block_size - 1, config.mask_token_id
        self.draft_vocab_size, self.draft_to_target = config.draft_vocab_size, weights.draft_to_target
        self.aux_layers = config.aux_layers
        self.aux_size = len(config.aux_layers) * config.target_hidden_size

    @property
    def output_vocab_size(self) -> int:
        """Columns of `logits`: the draft vocabulary."""
        return self.draft_vocab_size

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]."""
        combined = ops.norm_linear(aux_hidden, None, self.tensors.fc)
        return rms_norm(combined, self.tensors.hidden_norm, self.sizes.rms_norm_eps)

    def store_context(self, context: Tensor, store: Store) -> None:
        """context [T, hidden_size]: store each layer's keys and values of these rows."""
        eps = self.sizes.rms_norm_eps
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
        x = embedding(token_ids, self.embed_tokens, self.tensor_parallel, self.sizes.vocab_size)
        # The final norm is part of `logits`, where it is fused with the projection.
        return self.run_layers(x, attend)[-1]

    def weights(self) -> Mapping[str, Tensor]:
        """Return everything that the head reads, the vocabulary offsets too."""
        return {**named_tensors(self.tensors), **super().weights()}

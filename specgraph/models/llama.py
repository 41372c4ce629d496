"""Llama-shaped targets: what `specgraph.checkpoints.architectures.ARCHITECTURES` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer
from specgraph.models.config import ModelConfig
from specgraph.models.layers import DecoderLayer, attention_layers, decoder_blocks, linear, rms_norm, shortened
from specgraph.models.protocol import OutputProjection, TargetOutput
from specgraph.models.split import embedding, whole_logits
from specgraph.parallel import TensorParallel


class LlamaTarget:
    """A causal language model in the Llama layout. Implements `Target`."""

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        lm_head: Tensor,
        rotary: Tensor | None = None,
    ) -> None:
        """embed_tokens and lm_head [vocab_size, hidden_size], or this rank's rows; one tensor when tied. norm
        [hidden_size]. rotary: the table of all layers, float32 [positions, rotary_dim], where it exists already; by
        default `config` says how to make it."""
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = tuple(layers)
        self.norm = norm
        self.lm_head = lm_head
        shapes = attention_layers(config, len(self.layers), embed_tokens.device)
        self._attention_layers = tuple(
            replace(
                shape,
                sinks=layer.sinks,
                scale=shape.scale * layer.key_scale,
                rotary=shape.rotary if rotary is None else rotary,
            )
            for shape, layer in zip(shapes, self.layers, strict=True)
        )
        # Rounded to the dtype of the product, as the models with this factor are trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=embed_tokens.dtype))

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Return one per decoder layer."""
        return self._attention_layers

    @property
    def architecture(self) -> str:
        """`model_type` of its configuration."""
        return self.config.architecture

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers; also the largest aux layer id."""
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        """Columns of `logits`."""
        return self.config.vocab_size

    @property
    def tensor_parallel(self) -> TensorParallel:
        """Return how it is split."""
        return self.config.tensor_parallel

    @property
    def hidden_size(self) -> int:
        """Columns of the residual stream."""
        return self.config.hidden_size

    @property
    def max_model_len(self) -> int:
        """Positions in the rotary table."""
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and hidden states."""
        return self.embed_tokens.dtype

    def shorten(self, max_model_len: int) -> None:
        """Run with fewer positions: the rotary table has a row for each, and a window that hides none is gone."""
        self.config = self.config.with_max_position(max_model_len)
        self._attention_layers = shortened(self._attention_layers, self.config, self.embed_tokens.device)

    def forward(self, token_ids: Tensor, attend: Attend, aux_layers: Sequence[int] = ()) -> TargetOutput:
        """token_ids int64 [T] -> hidden states; see `Target.forward` for `aux_layers`."""
        eps = self.config.rms_norm_eps
        x = embedding(token_ids, self.embed_tokens, self.tensor_parallel, self.vocab_size)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        entering = [
            x
        ]  # the residual stream that enters each layer; then what leaves the last layer, and the final norm
        entering += decoder_blocks(x, self.layers, self._attention_layers, attend, eps)
        hidden = rms_norm(entering[-1], self.norm, eps)
        entering.append(hidden)
        if not aux_layers:
            return TargetOutput(hidden, hidden)
        return TargetOutput(hidden, torch.cat([entering[k] for k in aux_layers], dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return whole_logits(linear(hidden, self.lm_head), self.tensor_parallel, self.vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        """See `Target.projection`."""
        return OutputProjection(None, 0.0, self.lm_head, self.vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that forward and logits read; the rotary table too."""
        named = {"embed_tokens": self.embed_tokens, "norm": self.norm, "lm_head": self.lm_head}
        for index, layer in enumerate(self.layers):
            named.update(layer.named_tensors(f"layers.{index}"))
        for index, shape in enumerate(self._attention_layers):
            if shape.rotary is not None and all(shape.rotary is not table for table in named.values()):
                named["rotary" if index == 0 else f"rotary.{index}"] = shape.rotary
        return named

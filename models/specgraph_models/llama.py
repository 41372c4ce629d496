"""Llama-shaped targets. `specgraph_models.checkpoints.architectures.ARCHITECTURES` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specgraph.attention import Attend
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import DecoderModel
from specgraph_models.delta import Recur
from specgraph_models.layers import DecoderLayer, rms_norm
from specgraph_models.split import embedding
from specgraph_models.target import TargetOutput


class LlamaTarget(DecoderModel):
    """A causal language model in the Llama layout. Implements `Target`."""

    def __init__(
        self, config: ModelConfig, embed_tokens: Tensor, layers: Sequence[DecoderLayer], norm: Tensor, lm_head: Tensor
    ) -> None:
        """norm [hidden_size]. The rest as in `DecoderModel`."""
        super().__init__(config, embed_tokens, layers, lm_head)
        self.norm = norm
        self.architecture, self.num_layers = config.architecture, len(self.layers)
        # Rounded to the dtype of the product, as in the training of the models with this factor.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=embed_tokens.dtype))

    @property
    def max_model_len(self) -> int:
        return self.sizes.max_position_embeddings

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: Sequence[int] = (), recur: Recur | None = None
    ) -> TargetOutput:
        """Return the hidden states for token_ids, int64 [T]; see `Target.forward`."""
        x = embedding(token_ids, self.embed_tokens, self.tensor_parallel, self.vocab_size)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        # The residual stream that enters each layer, then the last layer's output, then the same after the final norm.
        entering = [x, *self.run_layers(x, attend, recur=recur)]
        hidden = rms_norm(entering[-1], self.norm, self.sizes.rms_norm_eps)
        entering.append(hidden)
        if not aux_layers:
            return TargetOutput(hidden, hidden)
        return TargetOutput(hidden, torch.cat([entering[k] for k in aux_layers], dim=-1))

    def weights(self) -> Mapping[str, Tensor]:
        return {**super().weights(), "norm": self.norm}

"""The EAGLE-1 drafter in plain torch: one decoder layer over fc(cat(embedding, hidden state)).

Row j, at rope position j, takes the token at j + 1 and the hidden state at j: first the target's, after its final norm,
then its own. There is no norm before the layer's attention and none after the layer; the target's head reads its output
as it is. Protocol: EAGLE, arXiv 2401.15077.
"""

from collections.abc import Iterator
from typing import Any

import torch
from decoder import ChainAttention, DecoderLayer, Head, config_for, initialise
from torch import nn
from transformers import LlamaConfig


class Eagle1Head(Head):
    """The head. `lm_head` [V, H] is the target's, and so are the embedded tokens."""

    @staticmethod
    def config_for(target: LlamaConfig) -> dict[str, Any]:
        """One layer with a larger MLP than the target's."""
        return config_for(
            target,
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            num_hidden_layers=1,
            intermediate_size=1024,
            tie_word_embeddings=False,
        )

    def __init__(self, config: dict[str, Any], lm_head: torch.Tensor) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * self.sizes.hidden_size, self.sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(self.sizes, input_norm=False)])
        self.register_buffer("lm_head", lm_head.float(), persistent=False)
        initialise(self)

    def unroll(self, embeds: torch.Tensor, hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Yield the draft logits [B, T - steps, V] of each step of the training-time test; see ChainAttention.

        Args:
            embeds: embedded tokens [B, T, H].
            hidden: the target's final hidden states [B, T, H].
            steps: how many draft steps to unroll.
        """
        rows = embeds.shape[1] - steps
        positions = torch.arange(rows, device=embeds.device)
        hidden, attention, (layer,) = hidden[:, :rows], ChainAttention(), self.layers
        for step in range(steps):
            x = self.fc(torch.cat([embeds[:, 1 + step : 1 + step + rows], hidden], dim=-1)).to(embeds.dtype)
            hidden = layer.finish(attention(*layer.self_attn.project(x, positions + step)), x)
            yield hidden @ self.lm_head.T

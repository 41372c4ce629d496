"""One multi-token prediction module in plain torch, reused at every draft step.

    x      = eh_proj(cat(enorm(embedding), hnorm(hidden state)))
    hidden = norm(layer(x))          what the target's head reads, and the next step's hidden state

Row j, at rope position j, takes the token at j + 1 and the hidden state at j, which is first the target's, after its
final norm. The folder has DeepSeek-V3's names (arXiv 2412.19437): the module is the layer after the target's last.
"""

from collections.abc import Iterator
from typing import Any

import torch
from decoder import ChainAttention, DecoderLayer, Head, LayerSizes, config_for, initialise
from torch import nn
from transformers import LlamaConfig


class SharedHead(nn.Module):
    """The norm before the target's head, which the checkpoint's names put under `shared_head`."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.eps)


class MtpModule(Head, DecoderLayer):
    """The module. `lm_head` [V, H] is the target's, and so are the embedded tokens."""

    @staticmethod
    def config_for(target: LlamaConfig) -> dict[str, Any]:
        """One module with a larger MLP than the target's layers; `num_hidden_layers` are those of the target."""
        return config_for(
            target,
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            num_hidden_layers=target.num_hidden_layers,
            num_nextn_predict_layers=1,
            intermediate_size=1024,
            tie_word_embeddings=True,
        )

    def __init__(self, config: dict[str, Any], lm_head: torch.Tensor) -> None:
        DecoderLayer.__init__(self, LayerSizes.of(config))
        self.config, self.sizes = config, LayerSizes.of(config)
        self.prefix = f"model.layers.{config['num_hidden_layers']}."
        size, eps = self.sizes.hidden_size, self.sizes.eps
        self.enorm, self.hnorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = SharedHead(self.sizes)
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
        hidden, attention = hidden[:, :rows], ChainAttention()
        for step in range(steps):
            pair = [self.enorm(embeds[:, 1 + step : 1 + step + rows]), self.hnorm(hidden)]
            x = self.eh_proj(torch.cat(pair, dim=-1)).to(embeds.dtype)
            attended = attention(*self.self_attn.project(self.input_layernorm(x), positions + step))
            hidden = self.shared_head.norm(self.finish(attended, x))
            yield hidden @ self.lm_head.T

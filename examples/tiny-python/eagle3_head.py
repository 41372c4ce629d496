"""The EAGLE-3 drafter in plain torch: one decoder layer over the target's auxiliary hidden states.

Conventions (those of vLLM and of the yuhuili checkpoints):
- Auxiliary hidden state k is the residual stream that enters the target's layer k, i.e. the output after k layers, not
  normalised; transformers calls it `hidden_states[k]`.
- Drafter row j, at rope position j, takes the token at j + 1 and the auxiliary hidden states at j; its logits are over
  the token at j + 2.
- The residual starts from the combined hidden state before `hidden_norm` (`norm_before_residual` false). The sum
  after the layer, before `norm`, is the hidden state of the next draft step.
Protocol: EAGLE-3, arXiv 2503.01840.
"""

from collections.abc import Iterator
from typing import Any

import torch
from decoder import ChainAttention, DecoderLayer, Head, LayerSizes, QueryKeyValue, config_for, initialise
from torch import nn
from transformers import LlamaConfig


class MidLayer(DecoderLayer):
    """The one decoder layer, named as in the checkpoint; q, k and v read cat(embedding, hidden state)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden_size)
        self.hidden_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.eps)


class Eagle3Head(Head):
    """The head. The embedding is the target's and is handed in as embedded tokens.

    `aux_layers` are the target's layers whose inputs the head reads.
    """

    @staticmethod
    def config_for(target: LlamaConfig, draft_vocab_size: int, aux_layers: list[int]) -> dict[str, Any]:
        """One layer like the target's."""
        return config_for(
            target,
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            num_hidden_layers=1,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target.hidden_size,
            norm_before_residual=False,
            eagle_config={
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": aux_layers,
                "norm_before_fc": False,
            },
            tie_word_embeddings=False,
        )

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        size, drafted = self.sizes.hidden_size, config["draft_vocab_size"]
        self.aux_layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.midlayer = MidLayer(self.sizes)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps=self.sizes.eps)
        self.lm_head = nn.Linear(size, drafted, bias=False)
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))
        initialise(self)

    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Let draft token i stand for target token `target_ids[i]` (ascending ids, int64 [draft vocab])."""
        self.d2t.copy_(target_ids - torch.arange(target_ids.numel(), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def target_ids(self) -> torch.Tensor:
        """The target's id of each draft token, int64 [draft vocab]."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Three auxiliary hidden states side by side [..., 3H] to the first step's hidden state [..., H]."""
        return self.fc(aux)

    def project(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> QueryKeyValue:
        """Rotated queries [B, heads, T, D], rotated keys and values [B, kv heads, T, D]."""
        layer = self.midlayer
        inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        return layer.self_attn.project(inputs, positions)

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From attention's output [B, heads, T, D] to (draft logits [B, T, draft vocab], next hidden [B, T, H])."""
        residual = self.midlayer.finish(attended, hidden)
        return self.lm_head(self.norm(residual)), residual

    def unroll(self, embeds: torch.Tensor, aux: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Training-time test: yield the draft logits [B, R, draft vocab] of each step, R = T - steps.

        Args:
            embeds: embedded tokens [B, T, H].
            aux: auxiliary hidden states [B, T, 3H].
            steps: how many draft steps to unroll.

        Step k gives row t the token at t + 1 + k at rope position t + k, and the hidden state that step k - 1 left in
        row t; see ChainAttention for the keys it sees.
        """
        rows = embeds.shape[1] - steps
        positions = torch.arange(rows, device=embeds.device)
        hidden = self.combine(aux[:, :rows]).to(aux.dtype)  # autocast must not narrow the residual stream
        attention = ChainAttention()
        for step in range(steps):
            query, key, value = self.project(embeds[:, 1 + step : 1 + step + rows], hidden, positions + step)
            logits, hidden = self.finish(attention(query, key, value), hidden)
            yield logits

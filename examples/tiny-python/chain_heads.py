"""The chain drafters in plain torch: EAGLE-1, EAGLE-3 and one multi-token prediction module.

Row j, at rope position j, takes the token at j + 1 and a hidden state at j: first the target's, then its own, of the
draft step before. Its logits are over the token at j + 2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from decoder import ChainAttention, DecoderLayer, Head, initialise
from torch import nn


class ChainHead(Head):
    """A head whose draft steps run one decoder layer. Each kind has

    - `rows(embeds, hidden, positions)`: rotated queries [B, heads, T, D], rotated keys and values [B, kv heads, T, D],
      and the residual stream [B, T, H];
    - `finish(attended, residual)`: from attention's output to draft logits and the next step's hidden state.
    """

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the first step's hidden states [B, T, H], made from the target's."""
        return states

    def unroll(self, embeds: torch.Tensor, states: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Training-time test: yield the draft logits [B, R, draft vocab] of each step, R = T - steps.

        Args:
            embeds: embedded tokens [B, T, H].
            states: the target's hidden states [B, T, ...].
            steps: how many draft steps to unroll.

        Step k gives row t the token at t + 1 + k at rope position t + k, and the hidden state that step k - 1 left in
        row t; see ChainAttention for the keys it sees.
        """
        rows = embeds.shape[1] - steps
        positions = torch.arange(rows, device=embeds.device)
        hidden, attend = self.combine(states[:, :rows]), ChainAttention()
        for step in range(steps):
            *projected, residual = self.rows(embeds[:, 1 + step : 1 + step + rows], hidden, positions + step)
            logits, hidden = self.finish(attend(*projected), residual)
            yield logits


class Eagle1Head(ChainHead):
    """One layer over fc(cat(embedding, hidden state)): EAGLE, arXiv 2401.15077.

    The hidden states are those after the target's final norm. There is no norm before the layer's attention and none
    after the layer; the target's head, `lm_head` [V, H], reads its output as it is.
    """

    def __init__(self, config: dict[str, Any], lm_head: torch.Tensor) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config["hidden_size"], config["hidden_size"], bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.register_buffer("lm_head", lm_head.float(), persistent=False)
        initialise(self)

    def rows(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.fc(torch.cat([embeds, hidden], dim=-1)).to(embeds.dtype)
        return *self.layers[0].self_attn.project(x, positions), x

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers[0].finish(attended, residual)
        return hidden @ self.lm_head.T, hidden


class MtpModule(ChainHead, DecoderLayer):
    """One module with DeepSeek-V3's names (arXiv 2412.19437): the layer after the target's last, used at every step.

    x      = eh_proj(cat(enorm(embedding), hnorm(hidden state)))
    hidden = norm(layer(x))          what the target's head reads, and the next step's hidden state
    """

    def __init__(self, config: dict[str, Any], lm_head: torch.Tensor) -> None:
        DecoderLayer.__init__(self, config)
        self.config = config
        self.prefix = f"model.layers.{config['num_hidden_layers']}."
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(size, eps=eps)})
        self.register_buffer("lm_head", lm_head.float(), persistent=False)
        initialise(self)

    def rows(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1)).to(embeds.dtype)
        return *self.self_attn.project(self.input_layernorm(x), positions), x

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.shared_head["norm"](DecoderLayer.finish(self, attended, residual))
        return hidden @ self.lm_head.T, hidden


class Eagle3Head(ChainHead):
    """One layer over the target's auxiliary hidden states: EAGLE-3, arXiv 2503.01840, as vLLM reads it.

    Auxiliary hidden state k is the residual stream that enters the target's layer k, i.e. the output after k layers,
    not normalised; `aux_layers` are those that the head reads. The residual starts from the combined hidden state
    before `hidden_norm` (`norm_before_residual` false). The sum after the layer, before `norm`, is the hidden state of
    the next draft step. The embedding is the target's.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        size, eps, drafted = config["hidden_size"], config["rms_norm_eps"], config["draft_vocab_size"]
        self.aux_layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.midlayer = DecoderLayer(config, inputs=2 * size)
        self.midlayer.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps=eps)
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

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the first step's hidden state [..., H], made from three of the target side by side [..., 3H]."""
        return self.fc(states).to(states.dtype)  # autocast must not narrow the residual stream

    def rows(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer = self.midlayer
        inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        return *layer.self_attn.project(inputs, positions), hidden

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.midlayer.finish(attended, residual)
        return self.lm_head(self.norm(hidden)), hidden

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoder import (
    ChainAttention,
    DecoderLayer,
    LayerSizes,
    QueryKeyValue,
    initialise,
    read_config,
    save_folder,
)
from safetensors.torch import load_file
from torch import nn


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the head. `aux_layers` are the target's layers whose inputs the head reads."""

    layer: LayerSizes
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, int, int]
    max_positions: int

    def to_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.layer.hidden_size,
            "num_hidden_layers": 1,
            **self.layer.to_json(),
            "max_position_embeddings": self.max_positions,
            "norm_before_residual": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
                "norm_before_fc": False,
            },
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float16",
            "torch_dtype": "float16",
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HeadConfig":
        """Read what to_json wrote."""
        first, second, third = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return cls(
            layer=LayerSizes.from_json(values),
            vocab_size=values["vocab_size"],
            draft_vocab_size=values["draft_vocab_size"],
            aux_layers=(first, second, third),
            max_positions=values["max_position_embeddings"],
        )


class MidLayer(DecoderLayer):
    """The one decoder layer, named as in the checkpoint; q, k and v read cat(embedding, hidden state)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden_size)
        self.hidden_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.eps)


class Eagle3Head(nn.Module):
    """The head. The embedding is the target's and is handed in as embedded tokens; it is not part of the state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.midlayer = MidLayer(config.layer)
        self.fc = nn.Linear(3 * config.layer.hidden_size, config.layer.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.layer.hidden_size, eps=config.layer.eps)
        self.lm_head = nn.Linear(config.layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
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

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16 weights, int64 d2t, bool t2d)."""
        save_folder(folder, self.config.to_json(), self.state_dict())

    @classmethod
    def load(cls, folder: Path) -> "Eagle3Head":
        """Read what save wrote, in float32."""
        head = cls(HeadConfig.from_json(read_config(folder)))
        head.load_state_dict(load_file(folder / "model.safetensors"))
        return head

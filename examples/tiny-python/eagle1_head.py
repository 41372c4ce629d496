"""The EAGLE-1 drafter in plain torch: one decoder layer over fc(cat(embedding, hidden state)).

Row j, at rope position j, takes the token at j + 1 and the hidden state at j: first the target's, after its final norm,
then its own. There is no norm before the layer's attention and none after the layer; the target's head reads its output
as it is. Protocol: EAGLE, arXiv 2401.15077.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoder import ChainAttention, DecoderLayer, LayerSizes, initialise, read_config, save_folder
from safetensors.torch import load_file
from torch import nn


@dataclass(frozen=True)
class Eagle1Config:
    """Sizes of the head."""

    layer: LayerSizes
    vocab_size: int
    max_positions: int

    def to_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": 1,
            **self.layer.to_json(),
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float16",
            "torch_dtype": "float16",
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Eagle1Config":
        """Read what to_json wrote."""
        return cls(LayerSizes.from_json(values), values["vocab_size"], values["max_position_embeddings"])


class Eagle1Head(nn.Module):
    """The head. `lm_head` [V, H] is the target's, and so are the embedded tokens: neither is part of the state."""

    def __init__(self, config: Eagle1Config, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.layer.hidden_size, config.layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config.layer, input_norm=False)])
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

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16)."""
        save_folder(folder, self.config.to_json(), self.state_dict())

    @classmethod
    def load(cls, folder: Path, lm_head: torch.Tensor) -> "Eagle1Head":
        """Read what save wrote, in float32."""
        head = cls(Eagle1Config.from_json(read_config(folder)), lm_head)
        head.load_state_dict(load_file(folder / "model.safetensors"))
        return head

"""One multi-token prediction module in plain torch, reused at every draft step.

    x      = eh_proj(cat(enorm(embedding), hnorm(hidden state)))
    hidden = norm(layer(x))          what the target's head reads, and the next step's hidden state

Row j, at rope position j, takes the token at j + 1 and the hidden state at j, which is first the target's, after its
final norm. The folder has DeepSeek-V3's names (arXiv 2412.19437): the module is the layer after the target's last.
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
class MtpConfig:
    """Sizes of the module, and after how many layers of the target it stands."""

    layer: LayerSizes
    vocab_size: int
    max_positions: int
    target_layers: int

    def to_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.target_layers,
            "num_nextn_predict_layers": 1,
            **self.layer.to_json(),
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float16",
            "torch_dtype": "float16",
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "MtpConfig":
        """Read what to_json wrote."""
        return cls(
            layer=LayerSizes.from_json(values),
            vocab_size=values["vocab_size"],
            max_positions=values["max_position_embeddings"],
            target_layers=values["num_hidden_layers"],
        )


class SharedHead(nn.Module):
    """The norm before the target's head, which the checkpoint's names put under `shared_head`."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.eps)


class MtpModule(DecoderLayer):
    """The module. `lm_head` [V, H] is the target's, and so are the embedded tokens: neither is part of the state."""

    def __init__(self, config: MtpConfig, lm_head: torch.Tensor) -> None:
        super().__init__(config.layer)
        size, eps = config.layer.hidden_size, config.layer.eps
        self.config = config
        self.enorm, self.hnorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = SharedHead(config.layer)
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

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16)."""
        state = {f"{self._prefix}{name}": value for name, value in self.state_dict().items()}
        save_folder(folder, self.config.to_json(), state)

    @classmethod
    def load(cls, folder: Path, lm_head: torch.Tensor) -> "MtpModule":
        """Read what save wrote, in float32."""
        module = cls(MtpConfig.from_json(read_config(folder)), lm_head)
        state = load_file(folder / "model.safetensors")
        module.load_state_dict({name.removeprefix(module._prefix): value for name, value in state.items()})
        return module

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.config.target_layers}."

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

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the head. `aux_layers` are the target's layers whose inputs the head reads."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    aux_layers: tuple[int, int, int]
    max_positions: int
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def to_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
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
            vocab_size=values["vocab_size"],
            draft_vocab_size=values["draft_vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            heads=values["num_attention_heads"],
            kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            aux_layers=(first, second, third),
            max_positions=values["max_position_embeddings"],
            rope_theta=values["rope_theta"],
            eps=values["rms_norm_eps"],
        )


class Attention(nn.Module):
    """Projections of the head's attention; queries, keys and values read cat(embedding, hidden state)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, rows, kv_rows = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * size, rows, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_rows, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, size, bias=False)


class GatedMLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The parts of the one decoder layer, named as in the checkpoint."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Eagle3Head(nn.Module):
    """The head. The embedding is the target's and is handed in as embedded tokens; it is not part of the state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.midlayer = MidLayer(config)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

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

    def project(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Heads:
        """Rotated queries [B, heads, T, D], rotated keys and values [B, kv heads, T, D]."""
        layer, config = self.midlayer, self.config
        inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)

        def per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
            return x.unflatten(-1, (heads, config.head_dim)).transpose(1, 2)

        attention = layer.self_attn
        query = per_head(attention.q_proj(inputs), config.heads)
        key = per_head(attention.k_proj(inputs), config.kv_heads)
        value = per_head(attention.v_proj(inputs), config.kv_heads)
        return rotate(query, positions, config.rope_theta), rotate(key, positions, config.rope_theta), value

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From attention's output [B, heads, T, D] to (draft logits [B, T, draft vocab], next hidden [B, T, H])."""
        layer = self.midlayer
        residual = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return self.lm_head(self.norm(residual)), residual

    def unroll(self, embeds: torch.Tensor, aux: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Training-time test: yield the draft logits [B, R, draft vocab] of each step, R = T - steps.

        Args:
            embeds: embedded tokens [B, T, H].
            aux: auxiliary hidden states [B, T, 3H].
            steps: how many draft steps to unroll.

        Step k gives row t the token at t + 1 + k at rope position t + k, the hidden state that step k - 1 left in
        row t, the keys of step 0 up to row t, and the keys of steps 1 to k of row t alone: what row t sees when a
        chain of k drafts starts there.
        """
        rows = embeds.shape[1] - steps
        group = self.config.heads // self.config.kv_heads
        positions = torch.arange(rows, device=embeds.device)
        hidden = self.combine(aux[:, :rows]).to(aux.dtype)  # autocast must not narrow the residual stream
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        future = torch.ones(rows, rows, dtype=torch.bool, device=embeds.device).triu(1)
        for step in range(steps):
            query, key, value = self.project(embeds[:, 1 + step : 1 + step + rows], hidden, positions + step)
            keys.append(key.repeat_interleave(group, dim=1))
            values.append(value.repeat_interleave(group, dim=1))
            scores = (query @ keys[0].transpose(-1, -2)).masked_fill(future, float("-inf"))
            own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
            weights = (torch.cat([scores, *own], dim=-1).float() * self.config.head_dim**-0.5).softmax(-1)
            weights = weights.to(query.dtype)
            attended = weights[..., :rows] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., rows + index, None] * value
            logits, hidden = self.finish(attended, hidden)
            yield logits

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16 weights, int64 d2t, bool t2d)."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        state = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Eagle3Head":
        """Read what save wrote, in float32."""
        head = cls(HeadConfig.from_json(json.loads((folder / "config.json").read_text())))
        head.load_state_dict(load_file(folder / "model.safetensors"))
        return head


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's rotary embedding in the half-split layout; x [B, heads, T, D], positions [T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

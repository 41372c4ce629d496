"""The parts of every drafter here, in plain torch: attention, MLP, rotation, a chain's attention, its folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from typing_extensions import Self


class Attention(nn.Module):
    """Projections of an attention; queries, keys and values read `inputs` columns. Head norms as in Qwen3 or none."""

    def __init__(self, config: dict[str, Any], inputs: int, head_norms: bool = False) -> None:
        super().__init__()
        self.head_dim, self.theta = config["head_dim"], config["rope_theta"]
        rows, kv_rows = (config[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        self.q_proj = nn.Linear(inputs, rows, bias=False)
        self.k_proj = nn.Linear(inputs, kv_rows, bias=False)
        self.v_proj = nn.Linear(inputs, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, config["hidden_size"], bias=False)
        if head_norms:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=config["rms_norm_eps"]) for _ in range(2))
        self.head_norms = head_norms

    def query(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rotated queries [B, heads, T, D] of x [B, T, inputs]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(self.q_norm(query) if self.head_norms else query, positions, self.theta)

    def key_value(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys, and values, [B, kv heads, T, D]."""
        key, value = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key) if self.head_norms else key, positions, self.theta), value

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values."""
        return self.query(x, positions), *self.key_value(x, positions)


class GatedMLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm layer, its attention left to the caller: `project`, then attend, then `finish`."""

    def __init__(
        self, config: dict[str, Any], inputs: int | None = None, input_norm: bool = True, head_norms: bool = False
    ) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config, inputs or size, head_norms)
        self.mlp = GatedMLP(size, config["intermediate_size"])
        if input_norm:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [B, T, H] after the layer, for attention's output [B, heads, T, D]."""
        residual = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class ChainAttention:
    """Attention of a chain drafter in the training-time test of EAGLE-3 (arXiv 2503.01840): one call per draft step.

    Row t of step k sees the keys of step 0 up to row t, and those of steps 1 to k of row t alone: what it sees when a
    chain of k drafts starts there.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [B, heads, T, D], key and value [B, kv heads, T, D], rotated; returns [B, heads, T, D]."""
        group = query.shape[1] // key.shape[1]
        self.keys.append(key.repeat_interleave(group, dim=1))
        self.values.append(value.repeat_interleave(group, dim=1))
        rows = query.shape[2]
        future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ self.keys[0].transpose(-1, -2)).masked_fill(future, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = (torch.cat([scores, *own], dim=-1).float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
        attended = weights[..., :rows] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            attended = attended + weights[..., rows + index, None] * value
        return attended


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's rotary embedding in the half-split layout; x [B, heads, T, D], positions [T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def initialise(module: nn.Module) -> None:
    """Matrices from a normal distribution of deviation 0.02; norms stay ones."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)


class Head(nn.Module):
    """A drafter made from its config.json. What it shares with the target is handed in and not part of its state."""

    prefix = ""
    """The beginning of the names in its checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors; floating point becomes float16."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {f"{self.prefix}{name}": value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        state = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    @classmethod
    def untrained(cls, folder: Path, *shared: torch.Tensor) -> Self:
        """Return a head of the sizes that a folder has; `shared` is what it shares with the target."""
        return cls(json.loads((folder / "config.json").read_text()), *shared)

    @classmethod
    def load(cls, folder: Path, *shared: torch.Tensor) -> Self:
        """Return the head that `save` wrote, in float32."""
        head = cls.untrained(folder, *shared)
        state = load_file(folder / "model.safetensors")
        head.load_state_dict({name.removeprefix(head.prefix): value for name, value in state.items()})
        return head

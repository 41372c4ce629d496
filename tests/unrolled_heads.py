"""The tiny-python target's EAGLE-1, MTP and DFlash drafters in plain torch, as they were trained: all rows at once.

EAGLE-1 and MTP: row j, at rope position j, takes the token at j + 1 and a hidden state at j: first the target's, then
its own, of the draft step before. Its logits are over the token at j + 2.

DFlash fills a block of masks in one pass, over context made from the target's states:

    context = hidden_norm(fc(cat(aux states)))     of every token before the block; each layer's keys and values of it
    block   = embed(last token, mask, mask, ...)   through all layers; a row sees the context and its whole block
    logits  = lm_head(norm(block))                 row i drafts the token at its own position
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


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


class Head(nn.Module):
    """A drafter made from its config.json. What it shares with the target is handed in and not part of its state."""

    prefix = ""
    """The beginning of the names in its checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def load(cls, folder: Path, *shared: torch.Tensor) -> Any:
        """Return the head of a folder, in float32; `shared` is what it shares with the target."""
        head = cls(json.loads((folder / "config.json").read_text()), *shared)
        state = load_file(folder / "model.safetensors")
        head.load_state_dict({name.removeprefix(head.prefix): value for name, value in state.items()})
        return head


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

    def rows(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1)).to(embeds.dtype)
        return *self.self_attn.project(self.input_layernorm(x), positions), x

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.shared_head["norm"](DecoderLayer.finish(self, attended, residual))
        return hidden @ self.lm_head.T, hidden


class DFlashHead(Head):
    """The head. `embedding` [V, H] is the target's, tied to its lm_head. A block has `block_size` rows: the last token
    and block_size - 1 masks. `aux_layers` are `target_layer_ids` by what enters the next layer."""

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor) -> None:
        super().__init__(config)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.mask_token_id = config["dflash_config"]["mask_token_id"]
        self.aux_layers = tuple(i + 1 for i in config["dflash_config"]["target_layer_ids"])
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        layers = range(config["num_hidden_layers"])
        self.layers = nn.ModuleList([DecoderLayer(config, head_norms=True) for _ in layers])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.register_buffer("embedding", embedding.float(), persistent=False)

    def forward(self, tokens: torch.Tensor, aux: torch.Tensor, anchors: torch.Tensor, drafts: int) -> torch.Tensor:
        """Draft `drafts` tokens after each anchor; returns logits [B, A, drafts, V].

        Args:
            tokens: int64 [B, T].
            aux: aux states [B, T, n * H].
            anchors: int64 [A], the positions of the blocks' first rows: a block sees the aux states before it.
            drafts: K, masks in a block.
        """
        (batch, length), rows = tokens.shape, 1 + drafts
        block = tokens.new_full((batch, anchors.numel(), rows), self.mask_token_id)
        block[:, :, 0] = tokens[:, anchors]
        x = F.embedding(block.flatten(1), self.embedding)
        context = self.hidden_norm(self.fc(aux)).to(x.dtype)  # autocast must not narrow the residual stream
        seen = torch.arange(length, device=tokens.device)
        positions = (anchors[:, None] + torch.arange(rows, device=tokens.device)).flatten()
        anchor = anchors.repeat_interleave(rows)  # of each row
        block_of = torch.arange(anchors.numel(), device=tokens.device).repeat_interleave(rows)
        visible = torch.cat([seen < anchor[:, None], block_of == block_of[:, None]], dim=1)
        for layer in self.layers:
            query, key, value = layer.self_attn.project(layer.input_layernorm(x), positions)
            context_key, context_value = layer.self_attn.key_value(context, seen)
            keys, values = torch.cat([context_key, key], 2), torch.cat([context_value, value], 2)
            group = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            x = layer.finish(F.scaled_dot_product_attention(query, keys.to(query), values.to(query), visible), x)
        logits = self.norm(x) @ self.embedding.T
        return logits.unflatten(1, (anchors.numel(), rows))[:, :, 1:]

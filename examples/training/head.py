"""The EAGLE-3 head (arXiv 2503.01840) in plain torch, in the format of host engines, with its training-time test.

Row t has rope position t. It takes the token at t + 1 and a hidden state at t, and its logits are for the token at
t + 2. In the first draft step `fc` combines three hidden states of the target; a later draft step takes the head's own
hidden state of the draft step before.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F


class Batch(NamedTuple):
    """Texts [B, T] padded to one length, the lengths of the texts [B], and the lengths of their prompts [B]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor


class DecoderLayer(nn.Module):
    """A Llama layer without attention itself, which the caller computes. Q, K and V project `inputs` columns."""

    def __init__(self, sizes: dict[str, Any], inputs: int) -> None:
        super().__init__()
        size, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
        rows, kv_rows = (sizes[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(size, eps=sizes["rms_norm_eps"]) for _ in range(2)
        )
        names = {"q_proj": (inputs, rows), "k_proj": (inputs, kv_rows), "v_proj": (inputs, kv_rows),
                 "o_proj": (rows, size)}  # fmt: skip
        self.self_attn = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in names.items()})
        names = {"gate_proj": (size, inner), "up_proj": (size, inner), "down_proj": (inner, size)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in names.items()})

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [B, T, H] after the layer, for attention's output [B, heads, T, D]."""
        residual = residual + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(residual)
        return residual + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class DraftHead(nn.Module):
    """The parts of every head: `fc` over states of the target, a last norm, and an lm_head over a draft vocabulary.

    A head shares the target's embedding.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    aux_scale: torch.Tensor

    def __init__(self, config: dict[str, Any], sizes: dict[str, Any], aux_layers: Sequence[int]) -> None:
        """config: the contents of config.json; sizes: the sizes of its layers; aux_layers: `fc` reads their inputs."""
        super().__init__()
        self.config, self.sizes, self.aux_layers = config, sizes, tuple(aux_layers)
        size, drafted = sizes["hidden_size"], config["draft_vocab_size"]
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps=sizes["rms_norm_eps"])
        self.lm_head = nn.Linear(size, drafted, bias=False)
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(sizes["vocab_size"], dtype=torch.bool))
        self.register_buffer("aux_scale", torch.ones(len(self.aux_layers) * size))

    def draft(
        self, embedding: torch.Tensor, batch: Batch, aux: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return N chains of drafts: the text of each [N], the position of its last known token [N], and its state
        after each draft step, [N, H] each."""
        raise NotImplementedError

    def logits(self, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return logits [N, draft vocab] for a draft step's states. The draft follows the token `before` [N]."""
        return self.lm_head(state)

    def confidence(self, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Return the logit [N] of the probability that a draft is right. None if the head has no confidence head."""
        return None

    def draft_ids(self) -> torch.Tensor:
        """Return the target's id of each draft token, ascending, int64 [draft vocab]."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def begin(self, draft_ids: torch.Tensor, embedding: torch.Tensor, norm: torch.Tensor, aux: torch.Tensor) -> None:
        """Set the draft vocabulary, and initialise the weights.

        `draft_ids` are ids of the target, ascending. The lm_head begins with their rows of `embedding`, the last norm
        with `norm`. Some elements of the target's states are a hundred times larger than others. In training they are
        divided by their root mean square over `aux` [N, n * H], and `save` multiplies `fc` by the same factors.
        """
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.aux_scale.copy_(aux.float().square().mean(0).clamp_min(1e-12).rsqrt())
        self.d2t.copy_(draft_ids - torch.arange(draft_ids.numel(), device=draft_ids.device))
        self.t2d.zero_()
        self.t2d[draft_ids] = True
        with torch.no_grad():
            self.lm_head.weight.copy_(embedding[draft_ids])
            self.norm.weight.copy_(norm)

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.detach().cpu() for name, value in self.state_dict().items()}
        state["fc.weight"] = state["fc.weight"] * state.pop("aux_scale")
        state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote."""
        state = load_file(folder / "model.safetensors")
        state["fc.weight"] = state["fc.weight"].float() / self.aux_scale.cpu()
        self.load_state_dict({**state, "aux_scale": self.aux_scale})


class Eagle3Head(DraftHead):
    """The EAGLE-3 head, with the names of its authors' folders (`LlamaForCausalLMEagle3`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, config, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.midlayer = DecoderLayer(config, 2 * config["hidden_size"])
        self.midlayer.hidden_norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def draft(
        self, embedding: torch.Tensor, batch: Batch, aux: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """See `DraftHead.draft`. A chain begins after each token of the answers except the last."""
        row = torch.arange(batch.tokens.shape[1] - steps, device=aux.device)
        begins = (row >= batch.prompts[:, None] - 1) & (row < batch.lengths[:, None] - 2)
        text, place = begins.nonzero(as_tuple=True)
        states = [state[text, place] for state in self.unroll(embedding[batch.tokens].float(), aux, steps)]
        return text, place + 1, states

    def unroll(self, embeds: torch.Tensor, aux: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Run the training-time test: yield the normalised state after each draft step, [B, R, H], R = T - steps.

        In draft step k, row t takes the token at t + 1 + k, the rope position t + k, and row t's hidden state of draft
        step k - 1. It sees the keys of draft step 0 up to row t, and row t's own keys of the later draft steps: the
        chain of drafts that begins at row t.

        Args:
            embeds: embedded tokens [B, T, H].
            aux: three concatenated hidden states of the target, [B, T, 3 * H].
            steps: draft steps.
        """
        rows, layer, head_dim = embeds.shape[1] - steps, self.midlayer, self.config["head_dim"]
        hidden = self.fc(aux[:, :rows] * self.aux_scale).to(
            embeds.dtype
        )  # autocast must not narrow the residual stream
        keys, values = list[torch.Tensor](), list[torch.Tensor]()
        future = torch.ones(rows, rows, dtype=torch.bool, device=embeds.device).triu(1)
        for step in range(steps):
            positions = torch.arange(step, step + rows, device=embeds.device)[None]
            inputs = layer.input_layernorm(embeds[:, 1 + step : 1 + step + rows]), layer.hidden_norm(hidden)
            both = torch.cat(inputs, dim=-1)
            query, key, value = (
                layer.self_attn[f"{name}_proj"](both).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in "qkv"
            )
            group = query.shape[1] // key.shape[1]
            query, key = (rotate(x, positions, self.config["rope_theta"]) for x in (query, key))
            keys.append(key.repeat_interleave(group, dim=1))
            values.append(value.repeat_interleave(group, dim=1))
            scores = (query @ keys[0].transpose(-1, -2)).masked_fill(future, float("-inf"))
            own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
            scores = torch.cat([scores, *own], dim=-1).float() * head_dim**-0.5
            weights = scores.softmax(-1).to(query.dtype)
            attended = weights[..., :rows] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., rows + index, None] * value
            hidden = layer.finish(attended, hidden)
            yield self.norm(hidden)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Return x [B, heads, T, D] with Llama's rotary embedding, half-split, of positions [B or 1, T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions[..., None].float() * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

"""The DFlash drafter in plain torch: a block of masks filled in one pass, over context made from the target's states.

context = hidden_norm(fc(cat(aux states)))     of every token before the block; each layer's keys and values of it
block   = embed(last token, mask, mask, ...)   through all layers; a row sees the context and its whole block
logits  = lm_head(norm(block))                 row i drafts the token at its own position

`target_layer_ids` are the authors': layer i's output, which is the aux state that enters layer i + 1, `hidden_states[i
+ 1]` in transformers. Layers are Qwen3's, with a norm on every query and key head.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoder import DecoderLayer, LayerSizes, initialise, read_config, save_folder
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of the head. A block has `block_size` rows: the last token and block_size - 1 masks."""

    layer: LayerSizes
    layers: int
    vocab_size: int
    max_positions: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The same layers by what enters them."""
        return tuple(i + 1 for i in self.target_layer_ids)

    def to_json(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.layers,
            **self.layer.to_json(),
            "max_position_embeddings": self.max_positions,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
            },
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float16",
            "torch_dtype": "float16",
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DFlashConfig":
        """Read what to_json wrote."""
        return cls(
            layer=LayerSizes.from_json(values),
            layers=values["num_hidden_layers"],
            vocab_size=values["vocab_size"],
            max_positions=values["max_position_embeddings"],
            target_layer_ids=tuple(values["dflash_config"]["target_layer_ids"]),
            block_size=values["block_size"],
            mask_token_id=values["dflash_config"]["mask_token_id"],
        )


class DFlashHead(nn.Module):
    """The head. `embedding` [V, H], the target's and tied to its lm_head, is not part of the state."""

    def __init__(self, config: DFlashConfig, embedding: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layer.hidden_size, config.layer.eps
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([DecoderLayer(config.layer, head_norms=True) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        initialise(self)

    def forward(self, tokens: torch.Tensor, aux: torch.Tensor, anchors: torch.Tensor, drafts: int) -> torch.Tensor:
        """Draft `drafts` tokens after each anchor; returns logits [B, A, drafts, V].

        Args:
            tokens: int64 [B, T].
            aux: aux states [B, T, n * H].
            anchors: int64 [A], the positions of the blocks' first rows: a block sees the aux states before it.
            drafts: K, masks in a block.
        """
        (batch, length), rows = tokens.shape, 1 + drafts
        block = tokens.new_full((batch, anchors.numel(), rows), self.config.mask_token_id)
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

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16)."""
        save_folder(folder, self.config.to_json(), self.state_dict())

    @classmethod
    def load(cls, folder: Path, embedding: torch.Tensor) -> "DFlashHead":
        """Read what save wrote, in float32."""
        head = cls(DFlashConfig.from_json(read_config(folder)), embedding)
        head.load_state_dict(load_file(folder / "model.safetensors"))
        return head

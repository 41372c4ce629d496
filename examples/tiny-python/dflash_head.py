"""The DFlash drafter in plain torch: a block of masks filled in one pass, over context made from the target's states.

context = hidden_norm(fc(cat(aux states)))     of every token before the block; each layer's keys and values of it
block   = embed(last token, mask, mask, ...)   through all layers; a row sees the context and its whole block
logits  = lm_head(norm(block))                 row i drafts the token at its own position

`target_layer_ids` are the authors': layer i's output, which is the aux state that enters layer i + 1, `hidden_states[i
+ 1]` in transformers. Layers are Qwen3's, with a norm on every query and key head.
"""

from typing import Any

import torch
from decoder import DecoderLayer, Head, initialise
from torch import nn
from torch.nn import functional as F


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

"""The DFlash and DSpark heads in plain torch, in the folder format of `speculators` 0.9.

The rows of a block are the last known token and mask tokens after it. Each row sees the target's states before the
block, and the whole block. In DFlash a mask drafts the token at its own position, and its logits are lm_head(x). In
DSpark (deepseek-ai) every row drafts the token after its position:

logits     = lm_head(x) + W2 @ W1[token before]      x: the row after all layers, normalised
confidence = sigmoid(w @ (x, W1[token before]))
"""

import random
from typing import Any

import torch
from head import Batch, DecoderLayer, DraftHead, rotate
from torch import nn
from torch.nn import functional as F


class DFlashHead(DraftHead):
    """The DFlash head. A block begins after every token of the answers; in training, after every second one."""

    def __init__(self, config: dict[str, Any]) -> None:
        sizes = config["transformer_layer_config"]
        super().__init__(config, sizes, config["aux_hidden_state_layer_ids"])
        size, norm = sizes["hidden_size"], {"eps": sizes["rms_norm_eps"]}
        self.hidden_norm = nn.RMSNorm(size, **norm)
        self.layers = nn.ModuleList([DecoderLayer(sizes, size) for _ in range(sizes["num_hidden_layers"])])
        for layer in self.layers:
            layer.self_attn.update({f"{name}_norm": nn.RMSNorm(sizes["head_dim"], **norm) for name in "qk"})

    def draft(
        self, embedding: torch.Tensor, batch: Batch, aux: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """See `DraftHead.draft`. In training a block makes 3 to `steps` drafts, since a host engine chooses K."""
        stride, drafts = (2, random.randint(min(3, steps), steps)) if self.training else (1, steps)
        count = int((batch.lengths - 1 - batch.prompts).max())
        offsets = torch.arange(random.randrange(stride), count, stride, device=aux.device)
        anchors = batch.prompts[:, None] + offsets
        text, which = (anchors < batch.lengths[:, None] - 1).nonzero(as_tuple=True)
        silent = 0 if self.config["sample_from_anchor"] else 1
        x = self.blocks(embedding, batch.tokens, aux, anchors, drafts + silent)[text, which]
        return text, anchors[text, which], list(x[:, silent:].unbind(1))

    def blocks(
        self, embedding: torch.Tensor, tokens: torch.Tensor, aux: torch.Tensor, anchors: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Return the blocks' rows after all layers and the last norm, [B, A, rows, H].

        Args:
            embedding: the target's embedding, [V, H].
            tokens: [B, T].
            aux: n concatenated hidden states of the target, [B, T, n * H].
            anchors: positions of the blocks' first tokens, [B, A].
            rows: the rows per block.
        """
        (batch, length), count = tokens.shape, anchors.shape[1]
        block = tokens.new_full((batch, count, rows), self.config["mask_token_id"])
        block[..., 0] = tokens.gather(1, anchors.clamp(max=length - 1))
        x = embedding[block.flatten(1)].float()
        context = self.hidden_norm(self.fc(aux * self.aux_scale)).to(x.dtype)
        seen = torch.arange(length, device=x.device)[None]
        positions = (anchors[..., None] + torch.arange(rows, device=x.device)).flatten(1)
        block_of = torch.arange(count * rows, device=x.device) // rows
        own = (block_of[:, None] == block_of).expand(batch, -1, -1)
        visible = torch.cat([seen[:, None] < anchors.repeat_interleave(rows, dim=1)[..., None], own], dim=-1)[:, None]
        for layer in self.layers:
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            query = self._heads(attn, "q", normed, positions)
            keys = torch.cat([self._heads(attn, "k", context, seen), self._heads(attn, "k", normed, positions)], dim=2)
            values = torch.cat([self._heads(attn, "v", context), self._heads(attn, "v", normed)], dim=2)
            group = query.shape[1] // keys.shape[1]
            keys, values = (each.to(query).repeat_interleave(group, 1) for each in (keys, values))
            x = layer.finish(F.scaled_dot_product_attention(query, keys, values, visible), x)
        return self.norm(x).unflatten(1, (count, rows))

    def _heads(
        self, attn: nn.ModuleDict, name: str, x: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the projection `name` of x [B, T, H] as [B, heads, T, D].

        If positions [B or 1, T] are given, it is also normalised and rotated.
        """
        projected = attn[f"{name}_proj"](x).unflatten(-1, (-1, self.sizes["head_dim"])).transpose(1, 2)
        if positions is None:
            return projected
        return rotate(attn[f"{name}_norm"](projected), positions, self.sizes["rope_parameters"]["rope_theta"])


class DSparkHead(DFlashHead):
    """The DSpark head: a DFlash head with a Markov and a confidence head. The last known token's row drafts too."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        size, vocab, rank = self.sizes["hidden_size"], self.sizes["vocab_size"], config["markov_rank"]
        embed, output = nn.Embedding(vocab, rank), nn.Linear(rank, config["draft_vocab_size"], bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": embed, "markov_w2": output})
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(size + rank, 1)})

    def logits(self, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.logits`."""
        return self.lm_head(state) + self.markov_head["markov_w2"](self.markov_head["markov_w1"](before))

    def confidence(self, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.confidence`."""
        both = torch.cat([state, self.markov_head["markov_w1"](before)], dim=-1)
        return self.confidence_head["proj"](both)[:, 0]

"""An MTP drafter with multi-head latent attention (DeepSeek-V3, arXiv:2412.19437), random and small.

x      = projection(cat(norm(embed(token)), norm(hidden)))
latent = norm(down_kv x)                       keys and values are one latent a row, and a rotated key
query  = [rotated part, up_k^T applied to the other part]     "absorbed": attention runs over latents
out    = o(up_v(attention))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer
from specgraph.models.config import RotaryConfig
from specgraph.models.layers import linear, rms_norm
from specgraph.models.protocol import DraftOutput, HeadKind
from specgraph.models.rotary import rotary_table
from specgraph.models.split import embedding

VOCAB, HIDDEN, HEADS, NOPE, ROPE, LATENT, VALUE, INNER, EPS = 96, 32, 4, 12, 8, 24, 10, 48, 1e-5
NORMS = {"embed": HIDDEN, "hidden": HIDDEN, "input": HIDDEN, "latent": LATENT, "mlp": HIDDEN, "out": HIDDEN}


class LatentMtpHead:
    """One module, reused at every step. Implements `DraftHead` by the layout that `store_latent` documents."""

    kind: HeadKind = "chain"
    projection = pair_input = None
    aux_layers: Sequence[int] = ()
    draft_to_target: Tensor | None = None
    hidden_size, aux_size, draft_vocab_size, dtype = HIDDEN, HIDDEN, VOCAB, torch.float32

    def __init__(self, num_positions: int, seed: int = 23) -> None:
        g = torch.Generator().manual_seed(seed)

        def matrix(*shape: int, scale: float = 0.25) -> Tensor:
            return torch.randn(*shape, generator=g) * scale

        self.named = {
            "embed_tokens": matrix(VOCAB, HIDDEN, scale=0.6),
            "projection": matrix(HIDDEN, 2 * HIDDEN),
            "query": matrix(HEADS * (ROPE + NOPE), HIDDEN),
            "down_kv": matrix(ROPE + LATENT, HIDDEN),
            "up_k": matrix(HEADS, NOPE, LATENT),
            "up_v": matrix(HEADS, LATENT, VALUE),
            "output": matrix(HIDDEN, HEADS * VALUE),
            "up": matrix(INNER, HIDDEN),
            "down": matrix(HIDDEN, INNER),
            "lm_head": matrix(VOCAB, HIDDEN, scale=0.4),
            **{f"norm.{name}": 1 + matrix(size, scale=0.2) for name, size in NORMS.items()},
            "rotary": rotary_table(RotaryConfig(), num_positions, ROPE, torch.device("cpu")),
        }  # fmt: skip

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """One key head that all query heads share."""
        scale = (NOPE + ROPE) ** -0.5
        return (AttentionLayer(HEADS, 1, ROPE + LATENT, scale, rotary=self.named["rotary"], latent=True),)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """The target's final hidden state as it is."""
        return aux_hidden

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """See `DraftHead.forward`."""
        w, tokens = self.named, token_ids.shape[0]
        both = [self._norm("embed", embedding(token_ids, w["embed_tokens"])), self._norm("hidden", hidden)]
        x = linear(torch.cat(both, dim=-1), w["projection"])
        inner = self._norm("input", x)
        rotated, plain = linear(inner, w["query"]).view(tokens, HEADS, ROPE + NOPE).split((ROPE, NOPE), dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), w["up_k"]).transpose(0, 1)
        key_rope, latent = linear(inner, w["down_kv"]).split((ROPE, LATENT), dim=-1)
        row = torch.cat([key_rope, self._norm("latent", latent)], dim=-1).unsqueeze(1)
        attended = attend(0, torch.cat([rotated, absorbed], dim=-1), row, row)[..., ROPE:]
        values = torch.bmm(attended.transpose(0, 1), w["up_v"]).transpose(0, 1).reshape(tokens, HEADS * VALUE)
        x = x + linear(values, w["output"])
        x = x if rows is None else x[rows]
        x = x + linear(torch.relu(linear(self._norm("mlp", x), w["up"])), w["down"])
        out = self._norm("out", x)
        return DraftOutput(out, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, HIDDEN] -> [N, VOCAB]."""
        return linear(hidden, self.named["lm_head"])

    def weights(self) -> Mapping[str, Tensor]:
        """All of it."""
        return self.named

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.named[f"norm.{name}"], EPS)

"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its absorbed form.

A row keeps one latent for the keys and values of all heads, and a rotated part that all heads share:

latent  = norm(down x)                       [kv_lora_rank]; the KV cache holds it behind the rotated part
query   = [rotated part, key_up^T plain]     per head; its scores with latents equal scores with the head's own keys
value   = value_up attended latents          per head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops import norm_linear
from specgraph.ops.linear import Norm, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of one head and of the latents, in elements."""

    query_rank: int | None
    """Rank of the query's own latent. None if queries are projected directly."""
    rank: int
    """kv_lora_rank"""
    rotated: int
    """qk_rope_head_dim"""
    plain: int
    """qk_nope_head_dim"""
    value: int
    """v_head_dim"""
    in_pairs: bool = False
    """The checkpoint rotates elements 2i and 2i + 1 together. Weights are reordered when they are loaded."""
    eps: float = 1e-6
    """The eps of the norms of latents: transformers' number. vLLM takes the model's eps instead."""
    latent_first: bool = False
    """Rows are [latent, rotated part], and rotation pairs elements 2i and 2i + 1, as in a host engine's KV cache."""
    splits_heads: bool = False
    """The ranks that split the model split the heads too, as host engines do. Otherwise each rank has all heads."""
    index_topk: int | None = None
    """The number of keys that an indexer would keep of a longer text (DeepSeek-V3.2). None without an indexer."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The weights of one layer's latent attention, besides its packed projection.

    The projection's rows are the query (or its latent), then the latent of keys and values, then the rotated part.
    """

    config: LatentConfig
    norm: Tensor
    """[rank]"""
    key_up: Tensor
    """[num_heads, plain, rank]"""
    value_up: Tensor
    """[num_heads, rank, value]"""
    query_norm: Tensor | None
    """[query_rank]"""
    query_up: Weight | None
    """[num_heads * (plain + rotated), query_rank]. It and `query_norm` are None if the query has no latent."""


def latent_heads(projected: Tensor, weights: LatentAttention) -> tuple[Tensor, Tensor]:
    """Return queries [T, num_heads, rotated + rank] and keys [T, 1, rotated + rank], which are also the values.

    With `latent_first` the latent comes before the rotated part in both.

    Args:
        projected: [T, rows of the packed projection].
    """
    config, rows = weights.config, projected.shape[0]
    query_size = projected.shape[1] - config.rank - config.rotated
    query, latent, shared = projected.split((query_size, config.rank, config.rotated), dim=-1)
    if weights.query_up is not None:
        norm = None if weights.query_norm is None else Norm(weights.query_norm, config.eps)
        query = norm_linear(query, norm, weights.query_up)
    plain, rotated = query.view(rows, -1, config.plain + config.rotated).split((config.plain, config.rotated), dim=-1)
    absorbed = torch.bmm(plain.transpose(0, 1), weights.key_up).transpose(0, 1)
    latent = functional.rms_norm(latent, (config.rank,), weights.norm, config.eps)
    order = slice(None, None, -1 if config.latent_first else 1)
    return torch.cat((rotated, absorbed)[order], dim=-1), torch.cat((shared, latent)[order], dim=-1).unsqueeze(1)


def latent_values(attended: Tensor, weights: LatentAttention) -> Tensor:
    """Map attended [T, num_heads, rotated + rank] to the values of all heads, [T, num_heads * value]."""
    config = weights.config
    latents = attended[..., : config.rank] if config.latent_first else attended[..., config.rotated :]
    latents = latents.transpose(0, 1)
    return torch.bmm(latents, weights.value_up).transpose(0, 1).flatten(1)

"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its absorbed form.

A row keeps one latent for the keys and values of all heads, and a rotated part that all heads share:

latent  = norm(down x)                       [kv_lora_rank]; what the KV cache holds, behind the rotated part
query   = [rotated part, key_up^T plain]     per head; scores over latents equal those over the heads' own keys
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
    """Rank of the query's own latent; None where queries are projected directly."""
    rank: int
    """kv_lora_rank"""
    rotated: int
    """qk_rope_head_dim"""
    plain: int
    """qk_nope_head_dim"""
    value: int
    """v_head_dim"""
    in_pairs: bool = False
    """The checkpoint rotates elements 2i and 2i + 1 together; weights are reordered when they are loaded."""
    eps: float = 1e-6
    """The eps of the norms of latents: transformers' number, where vLLM takes the model's."""
    latent_first: bool = False
    """Rows are [latent, rotated part], of which elements 2i and 2i + 1 are turned together: an engine's KV cache."""
    splits_heads: bool = False
    """The heads are split over the ranks that split the model, as engines do; else each rank has all of them."""
    index_topk: int | None = None
    """Keys that an indexer would leave of a longer text (DeepSeek-V3.2); None without one."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of one layer beside its packed projection, whose rows are those of the query (or of its latent), of the
    latent of keys and values, and of the rotated part."""

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
    """[num_heads * (plain + rotated), query_rank]; None with `query_norm`."""


def latent_heads(projected: Tensor, weights: LatentAttention) -> tuple[Tensor, Tensor]:
    """Return queries [T, num_heads, rotated + rank] and keys [T, 1, rotated + rank], which are the values too; both
    parts the other way round with `latent_first`.

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
    """attended [T, num_heads, rotated + rank] -> values of all heads, [T, num_heads * value]."""
    config = weights.config
    latents = attended[..., : config.rank] if config.latent_first else attended[..., config.rotated :]
    latents = latents.transpose(0, 1)
    return torch.bmm(latents, weights.value_up).transpose(0, 1).flatten(1)

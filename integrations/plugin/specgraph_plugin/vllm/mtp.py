"""Finds the parts of an `MtpHead` in vLLM's loaded MTP modules."""

from __future__ import annotations

from typing import Any

import torch
from specgraph_models.from_modules import CallMlp, linear_weight
from specgraph_models.mtp import MtpHead
from specgraph_models.mtp_from_modules import LatentParts, MtpParts, mtp_head_from_modules
from specgraph_models.parallel import TensorParallel

from specgraph.errors import UnsupportedError

MIMO, GLM, QWEN = "MiMoMTP", "Glm4MoeMTP", ("Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP")
DEEPSEEK = "DeepSeekMTP"
MTP_CLASSES = (MIMO, GLM, *QWEN, DEEPSEEK)
"""In order: a dense Qwen2 layer; GLM-4.5's mixture; gated attention of Qwen3-Next and Qwen3.5, with or without a
mixture; DeepSeek-V3's latent attention."""

LATENT_ATTENTION = "DeepseekV2MLAAttention"


def mtp_parts(module: Any) -> MtpParts:
    """Return the parts of the first MTP module, in a module of one of `MTP_CLASSES`. vLLM runs the first one only.

    Raises:
        UnsupportedError: the latent attention has another class than `LATENT_ATTENTION`.
    """
    inner, name = module.model, type(module).__name__
    if name in QWEN:
        return MtpParts(
            embed_tokens=inner.embed_tokens,
            embed_norm=inner.pre_fc_norm_embedding,
            hidden_norm=inner.pre_fc_norm_hidden,
            projection=inner.fc,
            layer=inner.layers[0],
            norm=inner.norm,
            lm_head=module.lm_head,
        )
    if name == MIMO:
        first = next(iter(inner.mtp_layers.values()))
        return MtpParts(
            embed_tokens=inner.embed_tokens,
            embed_norm=first.token_layernorm,
            hidden_norm=first.hidden_layernorm,
            projection=first.input_proj,
            layer=first.mtp_block,
            norm=first.final_layernorm,
            lm_head=module.lm_head,
            hidden_first=True,
        )
    first = next(iter(inner.layers.values()))
    return MtpParts(
        embed_tokens=inner.embed_tokens,
        embed_norm=first.enorm,
        hidden_norm=first.hnorm,
        projection=first.eh_proj,
        layer=first.mtp_block,
        norm=first.shared_head.norm,
        lm_head=first.shared_head.head,
        latent=latent_parts(first.mtp_block.self_attn) if name == DEEPSEEK else None,
    )


def latent_parts(attention: Any) -> LatentParts:
    """Return the parts of vLLM's latent attention, which has split `kv_b_proj` into the core's two matrices."""
    if (name := type(attention).__name__) != LATENT_ATTENTION:
        raise UnsupportedError(f"the drafter's attention is a {name}; served is {LATENT_ATTENTION}")
    inner = attention.mla_attn.mla_attn
    key_up, value_up = (getattr(inner, name, None) for name in ("W_UK_T", "W_UV"))
    return LatentParts(attention.fused_qkv_a_proj, key_up, value_up)


def mtp_head(module: Any, ranks: TensorParallel, call: CallMlp | None) -> MtpHead:
    """Return a head over a module of one of `MTP_CLASSES`, which vLLM has split over `ranks`.

    Args:
        call: runs vLLM's mixture of experts. If it is None, a drafter with a mixture is refused.

    Raises:
        UnsupportedError: `mtp_head_from_modules` raises it, or a scale of routed experts is not served in float16.
    """
    parts, name = mtp_parts(module), type(module).__name__
    scale = float(getattr(parts.layer, "routed_scaling_factor", 1.0))
    if parts.latent is not None and scale != 1 and linear_weight(parts.embed_tokens).dtype == torch.float16:
        raise UnsupportedError(f"routed_scaling_factor {scale} in float16, in which vLLM divides by it; served is 1.0")
    return mtp_head_from_modules(module.config, parts, ranks, call, carries_normed=name != GLM)

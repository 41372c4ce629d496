"""Finds the parts of an `MtpHead` in SGLang's loaded MTP modules. SGLang names the algorithm NEXTN, or EAGLE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specgraph_models.mtp import MtpHead
from specgraph_models.mtp_from_modules import LatentParts, MtpParts, mtp_head_from_modules
from specgraph_models.parallel import TensorParallel
from specgraph_plugin.sums import summed, sums_in_graph
from torch import Tensor

MIMO, GLM, DEEPSEEK = "MiMoMTP", "Glm4MoeForCausalLMNextN", "DeepseekV3ForCausalLMNextN"
QWEN = "Qwen3NextForCausalLMMTP", "Qwen3_5ForCausalLMMTP"
MTP_CLASSES = (MIMO, GLM, *QWEN, DEEPSEEK)
"""In order: a dense Qwen2 layer; GLM-4.5's mixture; gated attention of Qwen3-Next and Qwen3.5, with or without a
mixture; DeepSeek-V3's latent attention."""


def mtp_parts(module: Any) -> MtpParts:
    """Return the parts of a module of one of `MTP_CLASSES`."""
    inner, name = module.model, type(module).__name__
    if name in QWEN:
        layer = inner.layers[0]  # the layer is its own attention module
        norms = {norm: getattr(layer, norm) for norm in ("input_layernorm", "post_attention_layernorm")}
        return MtpParts(
            embed_tokens=inner.embed_tokens,
            embed_norm=module.pre_fc_norm_embedding,
            hidden_norm=module.pre_fc_norm_hidden,
            projection=module.fc,
            layer=SimpleNamespace(self_attn=layer, mlp=layer.mlp, **norms),
            norm=inner.norm,
            lm_head=module.lm_head,
        )
    if name == MIMO:
        return MtpParts(
            embed_tokens=inner.embed_tokens,
            embed_norm=inner.token_layernorm,
            hidden_norm=inner.hidden_layernorm,
            projection=inner.input_proj,
            layer=inner.mtp_block,
            norm=inner.final_layernorm,
            lm_head=module.lm_head,
            hidden_first=True,
        )
    attention = inner.decoder.self_attn
    latent = None
    if name == DEEPSEEK:
        first = getattr(attention, "fused_qkv_a_proj_with_mqa", None)  # None without q_lora_rank
        latent = LatentParts(first, attention.w_kc, attention.w_vc)
    return MtpParts(
        embed_tokens=inner.embed_tokens,
        embed_norm=inner.enorm,
        hidden_norm=inner.hnorm,
        projection=inner.eh_proj,
        layer=inner.decoder,
        norm=inner.shared_head.norm,
        lm_head=module.lm_head,
        latent=latent,
    )


def mtp_head(module: Any, ranks: TensorParallel, group: Any) -> MtpHead:
    """Return a head over a module of one of `MTP_CLASSES`. SGLang's mixture of experts runs in the draft graphs.

    Args:
        ranks: the ranks that SGLang has split the module over.
        group: SGLang's group of these ranks. None for one rank.

    Raises:
        UnsupportedError: `mtp_head_from_modules` raises it.
    """

    def call(mlp: Any, x: Tensor) -> Tensor:
        if group is None:
            return mlp(x)
        with sums_in_graph(group, ranks) as sums:
            out = mlp(x)
        return out if sums else summed(out, ranks)  # from 0.5.23 on, SGLang's layer sums, not the mixture

    return mtp_head_from_modules(module.config, mtp_parts(module), ranks, call)

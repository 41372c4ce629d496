"""The places of an `MtpHead`'s parts in SGLang's loaded MTP modules. SGLang names the algorithm NEXTN, or EAGLE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specgraph_models.mtp import MtpHead
from specgraph_models.mtp_from_modules import LatentParts, MtpParts, mtp_head_from_modules
from specgraph_plugin.sums import summed, sums_in_graph
from torch import Tensor

from specgraph.parallel import TensorParallel

MIMO, GLM, DEEPSEEK = "MiMoMTP", "Glm4MoeForCausalLMNextN", "DeepseekV3ForCausalLMNextN"
QWEN = "Qwen3NextForCausalLMMTP", "Qwen3_5ForCausalLMMTP"
MTP_CLASSES = (MIMO, GLM, *QWEN, DEEPSEEK)
"""A dense Qwen2 layer; GLM-4.5's mixture; Qwen3-Next's and Qwen3.5's gated attention with a mixture or without;
DeepSeek-V3's latent attention."""


def mtp_parts(module: Any) -> MtpParts:
    """Find them in one of `MTP_CLASSES`."""
    inner, name = module.model, type(module).__name__
    if name in QWEN:
        layer = inner.layers[0]  # its own attention
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
        first = getattr(attention, "fused_qkv_a_proj_with_mqa", None)  # without q_lora_rank it has none
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
    """The head over one of `MTP_CLASSES`, split over `ranks`; SGLang's mixture of experts runs in the draft graphs.

    Args:
        group: SGLang's group of these ranks; None for one.

    Raises:
        UnsupportedError: as of `mtp_head_from_modules`.
    """

    def call(mlp: Any, x: Tensor) -> Tensor:
        if group is None:
            return mlp(x)
        with sums_in_graph(group, ranks) as sums:
            out = mlp(x)
        return out if sums else summed(out, ranks)  # since 0.5.23 SGLang's layer adds up, not its mixture

    return mtp_head_from_modules(module.config, mtp_parts(module), ranks, call)

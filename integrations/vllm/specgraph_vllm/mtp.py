"""vLLM's loaded MTP modules as an `MtpHead`: views of its weights, but for a few that the head copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from specgraph.models.from_modules import (
    ROTARY_CLASSES,
    CallMlp,
    config_from_module,
    layer_from_module,
    linear_of,
    linear_weight,
    norm_of,
    set_rotary,
    vocabulary_rows,
)
from specgraph.models.mtp import MtpHead, MtpModule
from specgraph.ops.linear import Weight
from specgraph.parallel import TensorParallel
from specgraph_vllm import latent
from specgraph_vllm.latent import latent_layer, latent_model

MIMO, GLM, QWEN = "MiMoMTP", "Glm4MoeMTP", ("Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP")
DEEPSEEK = "DeepSeekMTP"
MTP_CLASSES = (MIMO, GLM, *QWEN, DEEPSEEK)
"""A dense Qwen2 layer; GLM-4.5's mixture; Qwen3-Next's and Qwen3.5's gated attention with a mixture or without;
DeepSeek-V3's latent attention."""

ROTARY = (*ROTARY_CLASSES, "MRotaryEmbedding")
"""vLLM's speculators give one position per row, for which a rotation by several is an ordinary one."""


class MtpParts(NamedTuple):
    """The modules that draft every token. vLLM's MTP speculator runs the first MTP module only, of however many."""

    embed_norm: Any
    hidden_norm: Any
    projection: Any
    block: Any
    """The decoder layer."""
    norm: Any
    lm_head: Any


def mtp_parts(module: Any) -> MtpParts:
    """Find them in one of `MTP_CLASSES`."""
    inner, name = module.model, type(module).__name__
    if name in QWEN:
        norms = inner.pre_fc_norm_embedding, inner.pre_fc_norm_hidden
        return MtpParts(*norms, inner.fc, inner.layers[0], inner.norm, module.lm_head)
    if name == MIMO:
        first = next(iter(inner.mtp_layers.values()))
        norms = first.token_layernorm, first.hidden_layernorm
        return MtpParts(*norms, first.input_proj, first.mtp_block, first.final_layernorm, module.lm_head)
    first = next(iter(inner.layers.values()))
    last = first.shared_head
    return MtpParts(first.enorm, first.hnorm, first.eh_proj, first.mtp_block, last.norm, last.head)


def mtp_head(module: Any, ranks: TensorParallel, call: CallMlp | None) -> MtpHead:
    """The head over one of `MTP_CLASSES`, split over `ranks`.

    Copies are MiMo's projection [hidden_size, 2 * hidden_size], which has the columns of the hidden state first where a
    head here has those of the embedding, and Qwen's norms, which multiply by 1 + weight.

    Args:
        call: runs vLLM's mixture of experts; None where none is served.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    inner, parts, name = module.model, mtp_parts(module), type(module).__name__
    if name == DEEPSEEK:
        model = latent_model(module.config, parts.block, inner.embed_tokens, ranks)
        assert model.latent is not None
        layer, rotary, neox = latent_layer(parts.block, model.latent, ranks, call), latent.ROTARY, False
    else:
        layers = SimpleNamespace(layers=[parts.block], embed_tokens=inner.embed_tokens)
        model = config_from_module(SimpleNamespace(config=module.config, model=layers), ranks, ROTARY)
        layer, rotary, neox = layer_from_module(parts.block, ranks, call), ROTARY, True
    projection = linear_of(parts.projection)
    if name == MIMO:
        of_hidden, of_embedding = linear_weight(parts.projection).chunk(2, dim=1)
        projection = Weight(torch.cat((of_embedding, of_hidden), dim=1))
    tensors = MtpModule(
        embed_norm=norm_of(parts.embed_norm),
        hidden_norm=norm_of(parts.hidden_norm),
        projection=projection,
        layer=layer,
        norm=norm_of(parts.norm),
    )
    embed_tokens, lm_head = (vocabulary_rows(of, model.vocab_size, ranks) for of in (inner.embed_tokens, parts.lm_head))
    head = MtpHead(model, [tensors], embed_tokens, lm_head, carries_normed=name != GLM)
    set_rotary(head, parts.block.self_attn, rotary, neox)
    return head

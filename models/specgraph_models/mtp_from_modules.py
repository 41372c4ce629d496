"""MTP heads over the modules that a host engine has loaded. The modules' names are as in `from_modules`.

Some names differ between host engines: the parts of an MTP drafter, and latent attention's first projection and
absorbed weights. A plugin finds these parts (`MtpParts`). The rest is the same for all host engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import UnsupportedError
from specgraph.ops.linear import Weight
from specgraph_models.config import ModelConfig
from specgraph_models.from_modules import (
    ROTARY_CLASSES,
    CallMlp,
    config_from_module,
    layer_from_module,
    linear_of,
    linear_weight,
    mlp_from_module,
    norm_of,
    other_names,
    plain,
    set_rotary,
    vocabulary_rows,
)
from specgraph_models.latent import LatentAttention, LatentConfig
from specgraph_models.layers import DecoderLayer
from specgraph_models.mtp import MtpHead, MtpModule
from specgraph_models.parallel import WHOLE, TensorParallel

ROTARY = (*ROTARY_CLASSES, "MRotaryEmbedding")
"""MRotaryEmbedding rotates by several positions per row. A drafter has one, so for it this is an ordinary rotation."""
LATENT_ROTARY = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding")


@dataclass(frozen=True, slots=True)
class LatentParts:
    """The parts of multi-head latent attention that host engines name differently."""

    projection: Any
    """The packed projection's module: the query's latent, the latent of keys and values, and the rotated part."""
    key_up: Tensor | None
    """[num_heads, plain, rank]. None if the host engine keeps it in another form."""
    value_up: Tensor | None
    """[num_heads, rank, value]. None if the host engine keeps it in another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpParts:
    """The modules that draft every token. If a checkpoint has several MTP modules, they are the first one's."""

    embed_tokens: Any
    embed_norm: Any
    hidden_norm: Any
    projection: Any
    layer: Any
    """The decoder layer; see `from_modules`."""
    norm: Any
    lm_head: Any
    latent: LatentParts | None = None
    hidden_first: bool = False
    """`projection` has the columns of the hidden state first. In a head here the embedding's columns are first."""


@other_names()
def mtp_head_from_modules(
    config: Any,
    parts: MtpParts,
    ranks: TensorParallel = WHOLE,
    call: CallMlp | None = None,
    *,
    carries_normed: bool = True,
) -> MtpHead:
    """Return the head over a host engine's modules, split over `ranks`.

    Only two parts are copies: a projection with `hidden_first`, and norms that multiply by 1 + weight.

    Args:
        config: the drafter's Hugging Face configuration.
        call: runs the host engine's mixture of experts. None if none is served.
        carries_normed: see `MtpHead`.

    Raises:
        UnsupportedError: if the modules have an option or a tensor that the head does not have, or lack a name.
    """
    if parts.latent is not None:
        model, layer = _latent_layer(config, parts, parts.latent, ranks, call)
        rotary, neox = LATENT_ROTARY, False
    else:
        inner = SimpleNamespace(layers=[parts.layer], embed_tokens=parts.embed_tokens)
        model = config_from_module(SimpleNamespace(config=config, model=inner), ranks, ROTARY)
        layer, rotary, neox = layer_from_module(parts.layer, ranks, call), ROTARY, True
    projection = linear_of(parts.projection)
    if parts.hidden_first:
        of_hidden, of_embedding = linear_weight(parts.projection).chunk(2, dim=1)
        projection = Weight(torch.cat((of_embedding, of_hidden), dim=1))
    tensors = MtpModule(
        embed_norm=norm_of(parts.embed_norm),
        hidden_norm=norm_of(parts.hidden_norm),
        projection=projection,
        layer=layer,
        norm=norm_of(parts.norm),
    )
    embed_tokens, lm_head = (vocabulary_rows(of, model.vocab_size, ranks) for of in (parts.embed_tokens, parts.lm_head))
    head = MtpHead(model, [tensors], embed_tokens, lm_head, carries_normed=carries_normed)
    set_rotary(head, parts.layer.self_attn, rotary, neox)
    return head


def _latent_layer(
    config: Any, parts: MtpParts, latent: LatentParts, ranks: TensorParallel, call: CallMlp | None
) -> tuple[ModelConfig, DecoderLayer]:
    """Return the sizes and the weights of a drafter with one layer of latent attention.

    `max_position_embeddings` is 1, because `set_rotary` takes the module's own table.
    """
    layer, attention = parts.layer, parts.layer.self_attn
    for option, found, served in (
        ("hidden_act", config.hidden_act, "silu"),
        ("index_topk", getattr(config, "index_topk", None), None),  # with it, an indexer chooses keys
        ("q_lora_rank", attention.q_lora_rank or None, attention.q_lora_rank or "a number"),
    ):
        if found != served:
            raise UnsupportedError(f"{option} {found} in a drafter with latent attention; served is {served}")
    dtype = linear_weight(parts.embed_tokens).dtype
    if {dtype} != {getattr(tensor, "dtype", None) for tensor in (latent.key_up, latent.value_up)}:
        raise UnsupportedError(
            f"latent attention without its keys' and values' up-projections in {dtype}: the engine keeps them in "
            "another form here"
        )
    assert latent.key_up is not None
    assert latent.value_up is not None
    sizes = LatentConfig(
        query_rank=int(attention.q_lora_rank),
        rank=int(attention.kv_lora_rank),
        rotated=int(attention.qk_rope_head_dim),
        plain=int(attention.qk_nope_head_dim),
        value=int(attention.v_head_dim),
        eps=float(attention.kv_a_layernorm.variance_epsilon),
        latent_first=True,
        splits_heads=True,
    )
    model = ModelConfig(
        architecture="deepseek_v3",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=0,
        num_layers=1,
        num_heads=int(attention.num_heads),
        num_kv_heads=1,
        head_dim=sizes.rank + sizes.rotated,
        rms_norm_eps=float(layer.post_attention_layernorm.variance_epsilon),
        max_position_embeddings=1,
        tie_word_embeddings=False,
        dtype=dtype,
        attention_scale=float(attention.scaling),
        rotary_dim=sizes.rotated,
        latent=sizes,
    ).split(ranks)
    output = linear_of(attention.o_proj)
    gate_up, down, mlp = mlp_from_module(layer.mlp, output, call)
    return model, DecoderLayer(
        qkv=linear_of(latent.projection),
        output=output,
        post_norm=norm_of(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        mlp=mlp,
        input_norm=norm_of(layer.input_layernorm),
        latent=LatentAttention(
            config=sizes,
            norm=norm_of(attention.kv_a_layernorm),
            key_up=plain(latent.key_up),
            value_up=plain(latent.value_up),
            query_norm=norm_of(attention.q_a_layernorm),
            query_up=linear_of(attention.q_b_proj),
        ),
        tensor_parallel=ranks,
    )

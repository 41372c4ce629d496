"""vLLM's multi-head latent attention as a layer of the core, over its weights and its KV cache of latents."""

from __future__ import annotations

from typing import Any

import torch

from specgraph.errors import UnsupportedError
from specgraph.models.config import ModelConfig
from specgraph.models.from_modules import CallMlp, linear_of, linear_weight, mlp_from_module, norm_of, plain
from specgraph.models.latent import LatentAttention, LatentConfig
from specgraph.models.layers import DecoderLayer
from specgraph.parallel import TensorParallel

LATENT_ATTENTION = "DeepseekV2MLAAttention"
ROTARY = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding")


def latent_model(config: Any, layer: Any, embed_tokens: Any, ranks: TensorParallel) -> ModelConfig:
    """Return the sizes of a drafter with one such layer. `max_position_embeddings` is 1: the module has a table.

    Args:
        config: the drafter's.
        layer: vLLM's decoder layer.
        embed_tokens: the drafter's embedding.
        ranks: over which vLLM has split the heads; the latents are whole on each.

    Raises:
        UnsupportedError: an option of the attention that the core does not have.
    """
    attention, dtype = layer.self_attn, linear_weight(embed_tokens).dtype
    if (name := type(attention).__name__) != LATENT_ATTENTION:
        raise UnsupportedError(f"the drafter's attention is a {name}; served is {LATENT_ATTENTION}")
    scale = float(getattr(layer, "routed_scaling_factor", 1.0))
    for option, found, served in (
        ("hidden_act", config.hidden_act, "silu"),
        ("index_topk", getattr(config, "index_topk", None), None),  # an indexer chooses keys
        ("q_lora_rank", attention.q_lora_rank or None, attention.q_lora_rank or "a number"),
        ("routed_scaling_factor in float16", 1.0 if dtype != torch.float16 else scale, 1.0),  # vLLM divides by it there
    ):
        if found != served:
            raise UnsupportedError(f"{option} {found} in a drafter with latent attention; served is {served}")
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
    return ModelConfig(
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


def latent_layer(layer: Any, sizes: LatentConfig, ranks: TensorParallel, call: CallMlp | None) -> DecoderLayer:
    """Return the layer's weights. vLLM has split `kv_b_proj` into what the core multiplies by: W_UK_T and W_UV.

    Args:
        ranks: over which vLLM has split the layer.
        call: runs a mixture of experts; None where none is served.

    Raises:
        UnsupportedError: a tensor of another kind.
    """
    attention = layer.self_attn
    inner = attention.mla_attn.mla_attn
    key_up, value_up = (getattr(inner, name, None) for name in ("W_UK_T", "W_UV"))
    if key_up is None or value_up is None:
        raise UnsupportedError("latent attention without W_UK_T and W_UV: vLLM keeps them in another form here")
    output = linear_of(attention.o_proj)
    gate_up, down, mlp = mlp_from_module(layer.mlp, output, call)
    return DecoderLayer(
        qkv=linear_of(attention.fused_qkv_a_proj),
        output=output,
        post_norm=norm_of(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        mlp=mlp,
        input_norm=norm_of(layer.input_layernorm),
        latent=LatentAttention(
            config=sizes,
            norm=norm_of(attention.kv_a_layernorm),
            key_up=plain(key_up),
            value_up=plain(value_up),
            query_norm=norm_of(attention.q_a_layernorm),
            query_up=linear_of(attention.q_b_proj),
        ),
        tensor_parallel=ranks,
    )

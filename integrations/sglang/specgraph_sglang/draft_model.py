"""SGLang's loaded EAGLE-3 module as a `DraftHead`, and its KV cache as the core's: views, no copies.

The module is SGLang's `LlamaForCausalLMEagle3`. Nothing of SGLang is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgraph import KVCache
from specgraph.errors import UnsupportedError
from specgraph.models.config import ModelConfig
from specgraph.models.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights
from specgraph.models.layers import DecoderLayer

EAGLE3_CLASS = "LlamaForCausalLMEagle3"

ROTARY_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""Rotations whose `cos_sin_cache` holds one row per position, cosines then sines."""

POOL_CLASS = "MHATokenToKVPool"


def draft_head(module: Any) -> Eagle3Head:
    """The head over the module's own weights, with the module's own table of cosines and sines.

    Args:
        module: as SGLang loaded it, its weights on the device and the target's embedding set.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    if (name := type(module).__name__) != EAGLE3_CLASS:
        raise UnsupportedError(f"the draft model is a {name}; served is {EAGLE3_CLASS}")
    config, inner = module.config, module.model
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act '{config.hidden_act}'; the drafter's MLP is gated by silu")
    if len(inner.layers) != 1:
        raise UnsupportedError(f"a drafter of {len(inner.layers)} layers; SGLang's EAGLE-3 of one layer is served")
    table, layer = _rotary(inner.layers[0].self_attn), inner.layers[0]
    model, draft_vocab, num_aux = (
        _model_config(module, table),
        int(config.draft_vocab_size),
        inner.num_aux_hidden_states,
    )
    ids: Tensor | None = module.hot_token_id
    fc, fc_norms = _weight(inner.fc), inner.fc_norm
    weights = Eagle3Weights(
        embed_tokens=_weight(inner.embed_tokens)[: model.vocab_size],  # SGLang pads the rows
        hidden_norm=_plain(layer.hidden_norm.weight),
        norm=_plain(inner.norm.weight),
        lm_head=_weight(module.lm_head)[:draft_vocab],
        fc=fc,
        fc_bias=_bias(inner.fc),
        input_norm=None if inner.input_norm is None else _plain(inner.input_norm.weight),
        fc_norms=() if fc_norms is None else tuple(_plain(norm.weight) for norm in fc_norms),
        draft_to_target=None if ids is None else ids.to(fc.device) - torch.arange(len(ids), device=fc.device),
    )
    sizes = Eagle3Config(
        model=model,
        target_hidden_size=fc.shape[1] // num_aux,
        draft_vocab_size=draft_vocab,
        aux_layers=tuple(range(num_aux)),  # SGLang's target hands them over; only their number matters
        norm_output=bool(inner.norm_output),
    )
    head = Eagle3Head(sizes, weights, [_layer(layer)])
    head.attention_layers = tuple(replace(shape, rotary=table) for shape in head.attention_layers)
    return head


def draft_cache(head: Eagle3Head, pool: Any, page_size: int) -> Sequence[KVCache]:
    """SGLang's pool of the drafter as paged caches: page p holds the slots p * page_size and the ones after it.

    Args:
        pool: the draft runner's `token_to_kv_pool`.
        page_size: slots per page.

    Raises:
        UnsupportedError: another kind of pool or layout.
    """
    if type(pool).__name__ != POOL_CLASS:
        raise UnsupportedError(f"the drafter's KV cache is a {type(pool).__name__}; served is {POOL_CLASS}")
    caches: list[KVCache] = []
    for shape, key, value in zip(head.attention_layers, pool.k_buffer, pool.v_buffer, strict=True):
        wanted = (shape.num_kv_heads, shape.head_dim)
        for tensor in (key, value):
            if tuple(tensor.shape[1:]) != wanted or not tensor.is_contiguous() or tensor.shape[0] % page_size:
                raise UnsupportedError(
                    f"the drafter's KV cache is {list(tensor.shape)} with pages of {page_size}; served is "
                    f"[slots, {wanted[0]}, {wanted[1]}], contiguous, in whole pages"
                )
            if tensor.dtype != head.dtype:
                raise UnsupportedError(f"the drafter's KV cache is {tensor.dtype}, its weights are {head.dtype}")
        caches.append(KVCache(key.view(-1, page_size, *wanted), value.view(-1, page_size, *wanted)))
    return caches


def _model_config(module: Any, table: Tensor) -> ModelConfig:
    config, first = module.config, module.model.layers[0]
    return ModelConfig(
        architecture="llama",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=first.mlp.down_proj.weight.shape[1],
        num_layers=1,
        num_heads=first.self_attn.num_heads,
        num_kv_heads=first.self_attn.num_kv_heads,
        head_dim=first.self_attn.head_dim,
        rms_norm_eps=float(first.post_attention_layernorm.variance_epsilon),
        max_position_embeddings=1,  # SGLang's table replaces the one that this makes
        tie_word_embeddings=False,
        dtype=_weight(module.model.embed_tokens).dtype,
        attention_scale=float(first.self_attn.scaling),
        rotary_dim=table.shape[1],
    )


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if (window := getattr(attention.attn, "sliding_window_size", -1)) not in (None, -1):
        raise UnsupportedError(f"a sliding window of {window} keys in the drafter")
    if getattr(attention.attn, "logit_cap", 0):
        raise UnsupportedError(f"logit_cap {attention.attn.logit_cap} in the drafter's attention")
    return DecoderLayer(
        qkv=_weight(attention.qkv_proj),
        output=_weight(attention.o_proj),
        post_norm=_plain(layer.post_attention_layernorm.weight),
        gate_up=_weight(mlp.gate_up_proj),
        down=_weight(mlp.down_proj),
        input_norm=_plain(layer.input_layernorm.weight),
        qkv_bias=_bias(attention.qkv_proj),
        output_bias=_bias(attention.o_proj),
        gate_up_bias=_bias(mlp.gate_up_proj),
        down_bias=_bias(mlp.down_proj),
    )


def _weight(module: Any) -> Tensor:
    """A plain, unquantised weight [out, in]."""
    method = type(getattr(module, "quant_method", None)).__name__
    weight: Any = getattr(module, "weight", None)
    if method not in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        raise UnsupportedError(f"a quantised drafter ({method}); its weights must be bfloat16 or float16")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.stride(1) != 1:
        raise UnsupportedError(f"{type(module).__name__} of the drafter has no plain weight [out, in]")
    return _plain(weight)


def _bias(module: Any) -> Tensor | None:
    return None if module.bias is None else _plain(module.bias)


def _plain(tensor: Tensor) -> Tensor:
    """The same memory without SGLang's subclass of Parameter, which would see every call with it."""
    return tensor.detach().as_subclass(Tensor)


def _rotary(attention: Any) -> Tensor:
    """float32 [positions, rotary_dim]: SGLang's own angles."""
    rotary = attention.rotary_emb
    if type(rotary).__name__ not in ROTARY_CLASSES or not rotary.is_neox_style:
        raise UnsupportedError(
            f"rotary embedding {type(rotary).__name__}, neox style {getattr(rotary, 'is_neox_style', None)}; served "
            f"are {', '.join(ROTARY_CLASSES)} in neox style"
        )
    return rotary.cos_sin_cache.to(torch.float32)

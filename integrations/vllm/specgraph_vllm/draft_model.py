"""vLLM's loaded EAGLE module as a `DraftHead`, and its KV cache as the core's: views, no copies.

The module is `Eagle3LlamaForCausalLM` or `EagleLlamaForCausalLM` of vLLM. Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specgraph import KVCache
from specgraph.errors import UnsupportedError
from specgraph.models.config import ModelConfig
from specgraph.models.eagle import EagleHead, EagleWeights
from specgraph.models.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights
from specgraph.models.layers import DecoderLayer

EAGLE3_CLASS, EAGLE_CLASS = "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"

ROTARY_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""Rotations whose `cos_sin_cache` holds one row per position, cosines then sines."""

MAX_AUX = 4
"""Hidden states of the target that the hand-over takes at most."""


def draft_head(module: Any) -> Eagle3Head | EagleHead:
    """The head over the module's own weights, with the module's own table of cosines and sines.

    Args:
        module: as vLLM loaded it, its weights on the device.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    name = type(module).__name__
    if name not in (EAGLE3_CLASS, EAGLE_CLASS):
        raise UnsupportedError(f"the draft model is a {name}; served are {EAGLE3_CLASS} and {EAGLE_CLASS}")
    config = module.config
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act '{config.hidden_act}'; the drafter's MLP is gated by silu")
    if getattr(config, "logit_scale", 1.0) <= 0:
        raise UnsupportedError(f"logit_scale {config.logit_scale}; a greedy draft needs a positive one")
    table = _rotary(module.model.layers[0].self_attn)
    head = _eagle3_head(module, table) if name == EAGLE3_CLASS else _eagle_head(module, table)
    head.attention_layers = tuple(replace(layer, rotary=table) for layer in head.attention_layers)
    return head


def _eagle3_head(module: Any, table: Tensor) -> Eagle3Head:
    config, inner = module.config, module.model
    if not inner.use_aux_hidden_state:
        raise UnsupportedError("eagle_config.use_aux_hidden_state is false; the head takes the target's hidden states")
    if inner.num_aux_hidden_states > MAX_AUX:
        raise UnsupportedError(f"the drafter takes {inner.num_aux_hidden_states} hidden states, at most {MAX_AUX}")
    model = _model_config(module, table)
    draft_vocab, num_aux = int(config.draft_vocab_size), int(inner.num_aux_hidden_states)
    offsets: Tensor | None = module.draft_id_to_target_id
    if draft_vocab == model.vocab_size:
        offsets = None  # vLLM 0.26 keeps zeros there
    fc, fc_norms = _weight(inner.fc), inner.fc_norm
    weights = Eagle3Weights(
        embed_tokens=_weight(inner.embed_tokens)[: model.vocab_size],  # vLLM pads the rows
        hidden_norm=_plain(inner.layers[0].hidden_norm.weight),
        norm=_plain(inner.norm.weight),
        lm_head=_weight(module.lm_head)[:draft_vocab],
        fc=fc,
        input_norm=None if inner.input_norm is None else _plain(inner.input_norm.weight),
        fc_norms=() if fc_norms is None else tuple(_plain(norm.weight) for norm in fc_norms),
        draft_to_target=None if offsets is None else _plain(offsets),
    )
    sizes = Eagle3Config(
        model=model,
        target_hidden_size=fc.shape[1] // num_aux,
        draft_vocab_size=draft_vocab,
        aux_layers=tuple(range(num_aux)),  # vLLM's target hands them over; only their number matters
        norm_before_residual=bool(getattr(config, "norm_before_residual", False)),
        norm_output=bool(inner.norm_output),
    )
    return Eagle3Head(sizes, weights, [_layer(layer) for layer in inner.layers])


def _eagle_head(module: Any, table: Tensor) -> EagleHead:
    inner, model = module.model, _model_config(module, table)
    weights = EagleWeights(
        embed_tokens=_weight(inner.embed_tokens)[: model.vocab_size],  # vLLM pads the rows
        fc=_weight(inner.fc),
        fc_bias=None,
        lm_head=_weight(module.lm_head)[: model.vocab_size],  # the target's
    )
    return EagleHead(model, weights, [_layer(layer) for layer in inner.layers])


def _model_config(module: Any, table: Tensor) -> ModelConfig:
    config, first = module.config, module.model.layers[0]
    return ModelConfig(
        architecture="llama",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=first.mlp.down_proj.weight.shape[1],
        num_layers=len(module.model.layers),
        num_heads=first.self_attn.num_heads,
        num_kv_heads=first.self_attn.num_kv_heads,
        head_dim=first.self_attn.head_dim,
        rms_norm_eps=float(first.post_attention_layernorm.variance_epsilon),
        max_position_embeddings=1,  # vLLM's table replaces the one that this makes
        tie_word_embeddings=False,
        dtype=_weight(module.model.embed_tokens).dtype,
        attention_scale=float(first.self_attn.scaling),
        rotary_dim=table.shape[1],
    )


@dataclass(frozen=True, slots=True)
class DraftCache:
    """The drafter's part of vLLM's KV cache."""

    caches: tuple[KVCache, ...]
    """Of each attention layer: strided views of vLLM's tensors."""
    block_size: int
    """Tokens per entry of the block tables."""
    group: int
    """The number of the KV cache group that the layers are in."""


def draft_cache(
    head: Eagle3Head | EagleHead,
    module: Any,
    groups: Sequence[Any],
    block_sizes: Sequence[int],
    tensors: Mapping[str, Any],
) -> DraftCache:
    """Find and view the drafter's KV cache.

    Args:
        groups: `KVCacheConfig.kv_cache_groups`.
        block_sizes: tokens per entry of the block tables, by group.
        tensors: `static_forward_context`: attention layers by name, each with its `kv_cache`.

    Raises:
        UnsupportedError: the layers are in several groups, or a tensor has another layout.
    """
    names: list[str] = [layer.self_attn.attn.layer_name for layer in module.model.layers]
    found = [index for index, group in enumerate(groups) if set(names) <= set(group.layer_names)]
    if len(found) != 1:
        raise UnsupportedError(f"the draft layers {names} are in {len(found)} KV cache groups together; one is served")
    size = block_sizes[found[0]]
    caches: list[KVCache] = []
    for name, layer in zip(names, head.attention_layers, strict=True):
        tensor: Any = tensors[name].kv_cache
        wanted = (layer.num_kv_heads, size, 2 * layer.head_dim)
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tuple(tensor.shape[1:]) != wanted:
            seen = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnsupportedError(
                f"the KV cache of {name} is {seen}; served is FlashAttention's [num_blocks, num_kv_heads, block_size, "
                f"2 * head_dim] = [*, {', '.join(map(str, wanted))}]"
            )
        if tensor.dtype != head.dtype or tensor.stride(3) != 1:
            raise UnsupportedError(f"the KV cache of {name} is {tensor.dtype} with strides {tensor.stride()}")
        key, value = tensor.transpose(1, 2).split(layer.head_dim, dim=3)
        caches.append(KVCache(key, value))
    return DraftCache(tuple(caches), size, found[0])


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norm: Tensor | None = getattr(layer.input_layernorm, "weight", None)  # EAGLE-1's first layer has none
    if getattr(attention, "do_llama_4_scaling", False):
        raise UnsupportedError("the drafter scales its queries by position (llama_4_scaling)")
    if getattr(attention.attn, "sliding_window", None) is not None:
        raise UnsupportedError(f"a sliding window of {attention.attn.sliding_window} keys in the drafter")
    return DecoderLayer(
        qkv=_weight(attention.qkv_proj),
        output=_weight(attention.o_proj),
        post_norm=_plain(layer.post_attention_layernorm.weight),
        gate_up=_weight(mlp.gate_up_proj),
        down=_weight(mlp.down_proj),
        input_norm=None if norm is None else _plain(norm),
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
    """The same memory without vLLM's subclass of Parameter, which would see every call with it."""
    return tensor.detach().as_subclass(Tensor)


def _rotary(attention: Any) -> Tensor:
    """float32 [positions, rotary_dim]: vLLM's own angles, rounded to the model's dtype as vLLM rounds them."""
    rotary = attention.rotary_emb
    if type(rotary).__name__ not in ROTARY_CLASSES or not rotary.is_neox_style:
        raise UnsupportedError(
            f"rotary embedding {type(rotary).__name__}, neox style {getattr(rotary, 'is_neox_style', None)}; served "
            f"are {', '.join(ROTARY_CLASSES)} in neox style"
        )
    return rotary.cos_sin_cache.to(torch.float32)

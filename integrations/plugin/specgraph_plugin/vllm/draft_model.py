"""Makes a `DraftHead` and the core's KV caches from vLLM's loaded drafter: views, no copies.

Modules of vLLM are known by the names of their classes. Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from specgraph_models import eagle3_head_from_module, eagle_head_from_module
from specgraph_models.dflash import DFlashHead
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head
from specgraph_models.from_modules import CallMlp
from specgraph_models.mtp import MtpHead
from specgraph_models.parallel import WHOLE, TensorParallel
from torch import Tensor

from specgraph.attention import AttentionLayer, KVCache
from specgraph.errors import UnsupportedError
from specgraph_plugin.vllm.config import FP8_CACHES
from specgraph_plugin.vllm.dflash import DFLASH_CLASS, DSPARK_CLASS, dflash_head, dspark_head
from specgraph_plugin.vllm.language_model import LANGUAGE_MODEL_CLASSES, language_model_head
from specgraph_plugin.vllm.mtp import LATENT_ATTENTION, MTP_CLASSES, mtp_head, mtp_parts

EAGLE3_CLASS, EAGLE_CLASS = "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"

VllmHead = Eagle3Head | EagleHead | DFlashHead | MtpHead | DraftModelHead

SERVED_CLASSES = (EAGLE3_CLASS, EAGLE_CLASS, DFLASH_CLASS, DSPARK_CLASS, *MTP_CLASSES, *LANGUAGE_MODEL_CLASSES)
"""The classes of vLLM's modules that `draft_head` reads."""


def draft_head(
    module: Any, target_hidden_size: Callable[[], int], ranks: TensorParallel = WHOLE, call: CallMlp | None = None
) -> VllmHead:
    """Return a head over the module's own weights, and its own table of cosines and sines.

    Args:
        module: the drafter that vLLM loaded, with weights on the device.
        target_hidden_size: returns the columns of the target's hidden states. Called if the module lacks this number.
        ranks: the ranks that vLLM has split the module over.
        call: runs one of vLLM's mixtures of experts. If it is None, a drafter with a mixture is refused.

    Raises:
        UnsupportedError: the module has an option or a tensor that the head does not have.
    """
    name = type(module).__name__
    if name not in SERVED_CLASSES:
        raise UnsupportedError(f"the draft model is a {name}; served are {', '.join(SERVED_CLASSES)}")
    config, inner = module.config, module.model
    if getattr(config, "logit_scale", 1.0) <= 0:
        raise UnsupportedError(f"logit_scale {config.logit_scale}; a greedy draft needs a positive one")
    if name == EAGLE_CLASS:
        return eagle_head_from_module(module, ranks)
    if name in MTP_CLASSES:
        return mtp_head(module, ranks, call)
    if name in LANGUAGE_MODEL_CLASSES:
        return language_model_head(module, target_hidden_size(), ranks)
    if name == DFLASH_CLASS:
        return dflash_head(module, ranks)
    if name == DSPARK_CLASS:
        return dspark_head(module, ranks)
    if not inner.use_aux_hidden_state:
        raise UnsupportedError("eagle_config.use_aux_hidden_state is false; the head takes the target's hidden states")
    whole = int(config.draft_vocab_size) == int(config.vocab_size)  # vLLM 0.26 then has a map of zeros
    return eagle3_head_from_module(
        module,
        draft_to_target=None if whole else module.draft_id_to_target_id,
        norm_before_residual=bool(getattr(config, "norm_before_residual", False)),
        ranks=ranks,
    )


def draft_layers(module: Any) -> Sequence[Any]:
    """Return the decoder layers that `draft_head` reads, in the order of the head's attention layers."""
    return [mtp_parts(module).layer] if type(module).__name__ in MTP_CLASSES else module.model.layers


def layer_name(layer: Any) -> str:
    """Return vLLM's name for the KV cache of a decoder layer's attention."""
    attention = layer.self_attn
    inner = attention.mla_attn.mla_attn if type(attention).__name__ == LATENT_ATTENTION else attention.attn
    return inner.layer_name


@dataclass(frozen=True, slots=True)
class DraftCache:
    """The drafter's part of vLLM's KV cache."""

    caches: tuple[KVCache, ...]
    """The KV cache of each attention layer: strided views of vLLM's tensors."""
    block_size: int
    """Tokens per entry of the block tables."""
    group: int
    """The index of the layers' KV cache group."""


def draft_cache(
    head: VllmHead,
    module: Any,
    groups: Sequence[Any],
    block_sizes: Sequence[int],
    tensors: Mapping[str, Any],
) -> DraftCache:
    """Return views of the drafter's part of vLLM's KV cache.

    Args:
        groups: vLLM's `KVCacheConfig.kv_cache_groups`.
        block_sizes: tokens per entry of the block tables, by group.
        tensors: vLLM's `static_forward_context`: the attention layers by name, each with its `kv_cache`.

    Raises:
        UnsupportedError: the layers are not all in one group, or a tensor has another layout.
    """
    names = [layer_name(layer) for layer in draft_layers(module)]
    found = [index for index, group in enumerate(groups) if set(names) <= set(group.layer_names)]
    if len(found) != 1:
        raise UnsupportedError(f"the draft layers {names} are in {len(found)} KV cache groups together; one is served")
    size = block_sizes[found[0]]
    caches: list[KVCache] = []
    for name, layer in zip(names, head.attention_layers, strict=True):
        cache: Any = _in_fp8(name, tensors[name])
        if (viewed := _keys_and_values(cache, layer, size)) is None:
            parts: list[Any] = list(cache) if isinstance(cache, (tuple, list)) else [cache]
            shapes = " and ".join(str([*part.shape]) if isinstance(part, Tensor) else str(type(part)) for part in parts)
            raise UnsupportedError(f"the KV cache of {name} is {shapes}; served is {_layouts(layer, size)}")
        dtypes = (head.dtype,) if layer.latent else (head.dtype, torch.float8_e4m3fn)
        for part in viewed:
            if part.dtype not in dtypes or part.stride(-1) != 1:
                raise UnsupportedError(f"the KV cache of {name} is {part.dtype} with strides {part.stride()}")
        caches.append(viewed)
    return DraftCache(tuple(caches), size, found[0])


def _keys_and_values(cache: Any, layer: AttentionLayer, size: int) -> KVCache | None:
    """Return views of a layer's KV cache, in one of the `_layouts`. None if it has another one."""
    heads, dim = layer.num_kv_heads, layer.head_dim
    if isinstance(cache, (tuple, list)) and len(cache) == 2 and not layer.latent:
        key, value = cache
        fits = all(isinstance(part, Tensor) and part.shape[1:] == (size, heads, dim) for part in (key, value))
        return KVCache(key, value) if fits else None
    if not isinstance(cache, Tensor):
        return None
    shape = tuple(cache.shape)
    if layer.latent:
        latents = cache.unsqueeze(2)
        return KVCache(latents, latents) if shape[1:] == (size, dim) else None
    if shape[1:] == (heads, size, 2 * dim):
        return KVCache(*cache.transpose(1, 2).split(dim, dim=3))
    if shape[:1] == (2,) and shape[2:] == (size, heads, dim):
        return KVCache(*cache.unbind())
    return None


def _layouts(layer: AttentionLayer, size: int) -> str:
    """Return the served layouts of a layer's KV cache with `size` tokens per block."""
    heads, dim = layer.num_kv_heads, layer.head_dim
    if layer.latent:
        return f"[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim] = [*, {size}, {dim}]"
    return (
        f"[num_blocks, num_kv_heads, block_size, 2 * head_dim] = [*, {heads}, {size}, {2 * dim}], "
        f"[2, num_blocks, block_size, num_kv_heads, head_dim] = [2, *, {size}, {heads}, {dim}], or two tensors "
        f"[num_blocks, block_size, num_kv_heads, head_dim] = [*, {size}, {heads}, {dim}]"
    )


def _in_fp8(name: str, layer: Any) -> Any:
    """Return an attention layer's KV cache. If vLLM stores e4m3 as bytes, return it viewed as e4m3."""
    cache = layer.kv_cache
    if not isinstance(cache, Tensor) or cache.dtype != torch.uint8 or layer.kv_cache_dtype not in FP8_CACHES:
        return cache
    if (scales := (layer._k_scale_float, layer._v_scale_float)) != (1.0, 1.0):
        raise UnsupportedError(f"the FP8 KV cache of {name} has scales {scales}; served are 1")
    return cache.view(torch.float8_e4m3fn)

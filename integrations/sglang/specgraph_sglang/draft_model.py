"""Makes a `DraftHead` and the core's KV caches from SGLang's loaded drafter: views, no copies.

Modules of SGLang are known by the names of their classes. Nothing of SGLang is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from specgraph_models import eagle3_head_from_module, eagle_head_from_module
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head
from specgraph_models.mtp import MtpHead
from specgraph_models.parallel import WHOLE, TensorParallel
from torch import Tensor

from specgraph import KVCache
from specgraph.errors import UnsupportedError
from specgraph_sglang.mtp import MTP_CLASSES, mtp_head, mtp_parts

EAGLE3_CLASS, EAGLE_CLASS = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"

POOL_CLASS, LATENT_POOL_CLASS = "MHATokenToKVPool", "MLATokenToKVPool"
HYBRID_POOL_CLASS = "HybridLinearKVPool"
"""The pool of a target with linear attention. It contains one of the other pools, for the drafter's layer."""

SglangHead = Eagle3Head | EagleHead | MtpHead


def draft_head(module: Any, ranks: TensorParallel = WHOLE, group: Any = None) -> SglangHead:
    """Return a head over the module's own weights, and its own table of cosines and sines.

    Args:
        module: the drafter that SGLang loaded, with weights on the device and the target's embedding set.
        ranks: the ranks that SGLang has split the module over.
        group: SGLang's group of these ranks. None for one rank.

    Raises:
        UnsupportedError: the module has an option or a tensor that the head does not have.
    """
    name = type(module).__name__
    if name == EAGLE_CLASS:
        return eagle_head_from_module(module, ranks)
    if name in MTP_CLASSES:
        return mtp_head(module, ranks, group)
    if name != EAGLE3_CLASS:
        served = ", ".join((EAGLE3_CLASS, EAGLE_CLASS, *MTP_CLASSES))
        raise UnsupportedError(f"the draft model is a {name}; served are {served}")
    if len(module.model.layers) != 1:
        raise UnsupportedError(
            f"a drafter of {len(module.model.layers)} layers; SGLang's EAGLE-3 of one layer is served"
        )
    ids: Tensor | None = module.hot_token_id
    if ids is not None:
        ids = ids.to(module.lm_head.weight.device)
        ids = ids - torch.arange(len(ids), device=ids.device)
    return eagle3_head_from_module(module, draft_to_target=ids, ranks=ranks)


def draft_cache(head: SglangHead, module: Any, pool: Any) -> Sequence[KVCache]:
    """Return SGLang's KV pool of the drafter as paged caches, one per attention layer.

    Page p holds the slots p * page_size to (p + 1) * page_size - 1.

    Args:
        module: the module that `head` was made from.
        pool: the draft runner's `token_to_kv_pool`.

    Raises:
        UnsupportedError: the pool is of another kind or layout, or its FP8 cache has scales.
    """
    if type(pool).__name__ == HYBRID_POOL_CLASS:
        pool = pool.full_kv_pool
    is_latent = head.attention_layers[0].latent
    if (name := type(pool).__name__) != (wanted := LATENT_POOL_CLASS if is_latent else POOL_CLASS):
        raise UnsupportedError(f"the drafter's KV cache is a {name}; served is {wanted}")
    if is_latent:
        buffers = [(buffer, buffer) for buffer in pool.kv_buffer]
    else:
        buffers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    layers = [mtp_parts(module).layer] if type(module).__name__ in MTP_CLASSES else module.model.layers
    caches, page_size = list[KVCache](), pool.page_size
    for layer, shape, (key, value) in zip(layers, head.attention_layers, buffers, strict=True):
        if pool.dtype == torch.float8_e4m3fn and not is_latent:  # SGLang stores it as bytes
            scales = layer.self_attn.attn.k_scale_float, layer.self_attn.attn.v_scale_float
            if not {None, 1.0}.issuperset(scales):
                raise UnsupportedError(f"the drafter's FP8 KV cache has scales {scales}; served are 1")
            key, value = key.view(pool.dtype), value.view(pool.dtype)
        wanted = (shape.num_kv_heads, shape.head_dim)
        for tensor in (key, value):
            if tuple(tensor.shape[1:]) != wanted or not tensor.is_contiguous() or tensor.shape[0] % page_size:
                raise UnsupportedError(
                    f"the drafter's KV cache is {list(tensor.shape)} with pages of {page_size}; served is "
                    f"[slots, {wanted[0]}, {wanted[1]}], contiguous, in whole pages"
                )
            if tensor.dtype != head.dtype and (is_latent or tensor.dtype != torch.float8_e4m3fn):
                raise UnsupportedError(f"the drafter's KV cache is {tensor.dtype}, its weights are {head.dtype}")
        caches.append(KVCache(key.view(-1, page_size, *wanted), value.view(-1, page_size, *wanted)))
    return caches

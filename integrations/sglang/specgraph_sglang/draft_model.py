"""SGLang's loaded EAGLE module as a `DraftHead`, and its KV cache as the core's: views, no copies.

The module is SGLang's `LlamaForCausalLMEagle3` or `LlamaForCausalLMEagle`. Nothing of SGLang is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph import KVCache
from specgraph.errors import UnsupportedError
from specgraph.models import eagle3_head_from_module, eagle_head_from_module
from specgraph.models.eagle import EagleHead
from specgraph.models.eagle3 import Eagle3Head
from specgraph.parallel import WHOLE, TensorParallel

EAGLE3_CLASS, EAGLE_CLASS = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"

POOL_CLASS = "MHATokenToKVPool"


def draft_head(module: Any, ranks: TensorParallel = WHOLE) -> Eagle3Head | EagleHead:
    """The head over the module's own weights, with the module's own table of cosines and sines.

    Args:
        module: as SGLang loaded it, its weights on the device and the target's embedding set.
        ranks: over which SGLang has split the module.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    name = type(module).__name__
    if name == EAGLE_CLASS:
        return eagle_head_from_module(module, ranks)
    if name != EAGLE3_CLASS:
        raise UnsupportedError(f"the draft model is a {name}; served are {EAGLE3_CLASS} and {EAGLE_CLASS}")
    if len(module.model.layers) != 1:
        raise UnsupportedError(
            f"a drafter of {len(module.model.layers)} layers; SGLang's EAGLE-3 of one layer is served"
        )
    ids: Tensor | None = module.hot_token_id
    if ids is not None:
        ids = ids.to(module.lm_head.weight.device)
        ids = ids - torch.arange(len(ids), device=ids.device)
    return eagle3_head_from_module(module, draft_to_target=ids, ranks=ranks)


def draft_cache(head: Eagle3Head | EagleHead, module: Any, pool: Any) -> Sequence[KVCache]:
    """SGLang's pool of the drafter as paged caches: page p holds the slots p * page_size and the ones after it.

    Args:
        module: the one that `head` is over.
        pool: the draft runner's `token_to_kv_pool`.

    Raises:
        UnsupportedError: another kind of pool or layout, or scales of an FP8 cache.
    """
    if type(pool).__name__ != POOL_CLASS:
        raise UnsupportedError(f"the drafter's KV cache is a {type(pool).__name__}; served is {POOL_CLASS}")
    caches, page_size = list[KVCache](), pool.page_size
    layers, buffers = module.model.layers, zip(pool.k_buffer, pool.v_buffer, strict=True)
    for layer, shape, (key, value) in zip(layers, head.attention_layers, buffers, strict=True):
        if pool.dtype == torch.float8_e4m3fn:  # stored as bytes
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
            if tensor.dtype not in (head.dtype, torch.float8_e4m3fn):
                raise UnsupportedError(f"the drafter's KV cache is {tensor.dtype}, its weights are {head.dtype}")
        caches.append(KVCache(key.view(-1, page_size, *wanted), value.view(-1, page_size, *wanted)))
    return caches

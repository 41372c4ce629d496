"""The check of a drafter's KV caches: they fit the head's layers, and no two keys share memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from specgraph.attention import AttentionBackend, AttentionLayer, KVCache
from specgraph.config import DraftConfig
from specgraph.draft.protocol import Head
from specgraph.errors import ConfigError
from specgraph.ops.tensor_forms import described, dimensions, is_freed, repeats


def check_caches(
    head: Head, caches: Sequence[KVCache], config: DraftConfig, device: torch.device, attention: AttentionBackend
) -> None:
    """Raise ConfigError if the KV caches don't fit head, config, device or attention, if they share memory, or if the
    head has too few positions."""
    layers = head.attention_layers
    if len(caches) != len(layers):
        raise ConfigError(f"the drafter has {len(layers)} attention layer(s), got {len(caches)} KV caches")
    dtypes = (head.dtype, *(getattr(attention, "cache_dtypes", None) or ()))
    for layer, cache in zip(layers, caches, strict=True):
        _check_layer(layer, config, device)
        wanted = (config.block_size // layer.context_size, layer.num_kv_heads, layer.head_dim)
        for name, tensor in cache._asdict().items():
            _check_cache(f"the drafter's {name} cache", tensor, wanted, device)
            if tensor.dtype not in dtypes:
                raise ConfigError(
                    f"the drafter's {name} cache is {tensor.dtype}; for this head and attention '{attention.name}' it "
                    f"is {' or '.join(map(str, dtypes))}"
                )
        if cache.key.shape[0] != cache.value.shape[0]:
            raise ConfigError(
                f"the drafter's key cache has {cache.key.shape[0]} blocks, its value cache {cache.value.shape[0]}: one "
                "block table serves both"
            )
        if len(cache.key) < 2 or (cache.key.data_ptr() == cache.value.data_ptr() and not layer.latent):
            raise ConfigError(
                f"the drafter's key and value caches have {len(cache.key)} blocks at {cache.key.data_ptr():#x} and "
                f"{cache.value.data_ptr():#x}: give two tensors, each with blocks beside block 0, the null block"
            )
    _check_apart(layers, caches)


def _check_layer(layer: AttentionLayer, config: DraftConfig, device: torch.device) -> None:
    if layer.rotary is not None and layer.rotary.shape[0] < config.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and the drafter was loaded for {layer.rotary.shape[0]} "
            "positions (its target's max_model_len)"
        )
    if layer.num_heads % layer.num_kv_heads:
        raise ConfigError(
            f"an attention layer of the drafter has {layer.num_heads} query heads, which cannot share "
            f"{layer.num_kv_heads} KV heads evenly"
        )
    for name, tensor in (("rotary", layer.rotary), ("sinks", layer.sinks)):
        if tensor is not None and tensor.device.type != device.type:
            raise ConfigError(f"an attention layer's {name} is on {tensor.device}; the platform's device is {device}")


def _check_cache(what: str, tensor: Tensor, wanted: tuple[int, ...], device: torch.device) -> None:
    if tuple(tensor.shape[1:]) != wanted or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{what} is {described(tensor)}; needed is [num_blocks, block_size, num_kv_heads, head_dim] = "
            f"[*, {', '.join(map(str, wanted))}]"
        )
    if tensor.device.type != device.type:
        raise ConfigError(f"{what} is on {tensor.device}; allocate it on the platform's device, {device}")
    if is_freed(tensor):
        raise ConfigError(f"{what} is {described(tensor)}: allocate it again")
    if repeats(tensor):
        raise ConfigError(
            f"{what} has strides {tensor.stride()}, by which several of its elements share memory: allocate one that "
            "has memory for each"
        )


def _check_apart(layers: Sequence[AttentionLayer], caches: Sequence[KVCache]) -> None:
    """Check that the caches of all layers have the same number of blocks, and that no two caches overlap."""
    parts: list[tuple[str, Tensor]] = []
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if len(cache.key) != len(caches[0].key):
            raise ConfigError(
                f"the caches of layer {index} have {len(cache.key)} blocks, those of layer 0 {len(caches[0].key)}: one "
                "block table serves all layers"
            )
        parts += [(f"key cache of layer {index}", cache.key)]
        parts += [] if layer.latent else [(f"value cache of layer {index}", cache.value)]
    for (one, first), (other, second) in combinations(parts, 2):
        if overlap(first, second):
            raise ConfigError(
                f"the drafter's {one} and {other} share memory, so one would overwrite the other: allocate each of them"
            )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have a byte in common. Interleaved views of one memory need not have one."""
    limits: dict[int, tuple[int, int]] = {}
    for stride, count in dimensions(one):
        least, most = limits.get(stride, (0, 0))
        limits[stride] = least, most + count - 1
    for stride, count in dimensions(other):
        least, most = limits.get(stride, (0, 0))
        limits[stride] = least - (count - 1), most
    limits.pop(0, None)
    steps = sorted(((stride, *limit) for stride, limit in limits.items()), reverse=True)

    def reaches(distance: int, place: int = 0) -> bool:
        """Return whether some multiples of the strides from `place` on add up to the distance, in bytes."""
        if place == len(steps):
            return distance == 0
        stride, least, most = steps[place]
        shortest = sum(each * low for each, low, _ in steps[place + 1 :])
        longest = sum(each * high for each, _, high in steps[place + 1 :])
        first, last = max(least, -((longest - distance) // stride)), min(most, (distance - shortest) // stride)
        return any(reaches(distance - number * stride, place + 1) for number in range(first, last + 1))

    return one.numel() > 0 < other.numel() and reaches(other.data_ptr() - one.data_ptr())

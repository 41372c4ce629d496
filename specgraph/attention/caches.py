"""The allocation of KV caches, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph.attention.interface import AttentionLayer
from specgraph.errors import CapacityError, ConfigError, first_line
from specgraph.ops import KVCache
from specgraph.validation import Count, Tokens, checked


def bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all of these layers, on this rank."""
    return sum(
        -(-(1 if a.latent else 2) * a.num_kv_heads * a.head_dim * dtype.itemsize // a.context_size) for a in layers
    )


def num_blocks(caches: Sequence[KVCache]) -> int:
    """Return the number of KV blocks in each cache. Without caches it is the largest int32."""
    return len(caches[0].key) if caches else torch.iinfo(torch.int32).max


@checked
def allocate_caches(
    layers: Sequence[AttentionLayer], num_blocks: Count, block_size: Tokens, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Allocate a zeroed cache per layer: a tensor [num_blocks, block_size, num_kv_heads, head_dim] for keys, and one
    for values.

    A latent layer has one tensor for both. If ranks share the keys, `block_size` is divided by the number of ranks.

    Raises:
        ConfigError: ranks cannot share a block evenly.
        CapacityError: the device has not enough memory.
    """

    def zeros(layer: AttentionLayer) -> torch.Tensor:
        shape = num_blocks, block_size // layer.context_size, layer.num_kv_heads, layer.head_dim
        return torch.zeros(shape, dtype=dtype, device=device)

    if (uneven := next((layer.context_size for layer in layers if block_size % layer.context_size), None)) is not None:
        raise ConfigError(f"KV blocks of {block_size} tokens over {uneven} ranks: choose a block_size that they divide")
    try:
        keys = [zeros(layer) for layer in layers]
        return [KVCache(key, key if a.latent else zeros(a)) for key, a in zip(keys, layers, strict=True)]
    except (RuntimeError, MemoryError) as error:  # torch's errors of all devices are RuntimeErrors
        wanted = bytes_per_token(layers, dtype) * block_size * num_blocks / 2**30
        raise CapacityError(
            f"{num_blocks} KV blocks of {block_size} tokens in {len(layers)} layers take {wanted:.2f} GiB, which could "
            f"not be allocated; lower num_blocks, max_model_len or max_num_requests ({first_line(error)[:120]})"
        ) from error

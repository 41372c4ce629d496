"""What an attention op is called with: rows rotated and stored in the cache, in the form that the op's row wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionLayer, AttentionMetadata, KVCache
from specgraph.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rows:
    """Operands of one call, its output, and how that becomes the layer's output."""

    operands: Mapping[str, Tensor]
    """query [T, num_heads, dim]; key and value, caches. MLA: also query_rope [T, num_heads, rope_dim] and key_rope."""
    out: Tensor
    """[T, num_heads, dim], which the op writes."""
    pad: int = 0
    """Columns of zeros in front of the output."""

    def result(self) -> Tensor:
        """[T, num_heads, head_dim]; call it after the op was issued."""
        return torch.nn.functional.pad(self.out, (self.pad, 0)) if self.pad else self.out


def store_heads(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata,
    flat: bool = True,
) -> Rows:  # fmt: skip
    """Heads as the core's attention takes them; see `AttentionBackend.forward`.

    Args:
        flat: the op takes caches of [num_blocks, block_size, num_kv_heads * head_dim], with all heads in one dimension.
    """
    query = kernels.rotate_and_store(
        query, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )
    caches = [each.flatten(2) if flat else each for each in cache]
    return Rows({"query": query, "key": caches[0], "value": caches[1]}, torch.empty_like(query))


def store_latent(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> Rows:
    """Multi-head latent attention with absorbed projections (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A row is [rotated part, latent], of rope_dim (the columns of the rotary table) and latent_dim columns: query is
    [T, num_heads, rope_dim + latent_dim], key and value are the same [T, 1, rope_dim + latent_dim]. Of the value only
    the latent counts, and the result has zeros in the first rope_dim columns. So such a head also runs on the core's
    paged attention, which attends over whole rows. Here the latents lie packed at the start of the value cache's
    memory and the rotated parts at the start of the key cache's.

    Raises:
        UnsupportedError: more than one key head, or nothing to rotate.
    """
    rope = 0 if layer.rotary is None else layer.rotary.shape[1]
    if layer.rotary is None or layer.num_kv_heads != 1 or rope >= layer.head_dim:
        raise UnsupportedError(
            f"latent attention takes one key head of a rotated part and a latent; this layer has {layer.num_kv_heads} "
            f"key heads of {layer.head_dim} with {rope or 'none'} rotated: use 'fia'"
        )
    key_rope, latent = _packed(cache.key, rope), _packed(cache.value, layer.head_dim - rope)
    query_rope = kernels.rotate_and_store(
        query[..., :rope].contiguous(), key[..., :rope].contiguous(), value[..., rope:].contiguous(), layer.rotary,
        metadata.positions, metadata.slot_mapping, key_rope, latent,
    )  # fmt: skip
    query, key_rope, latent = query[..., rope:].contiguous(), key_rope.flatten(2), latent.flatten(2)
    operands = {"query": query, "key": latent, "value": latent, "query_rope": query_rope, "key_rope": key_rope}
    return Rows(operands, torch.empty_like(query), pad=rope)


def _packed(cache: Tensor, columns: int) -> Tensor:
    """[num_blocks, block_size, 1, columns] at the start of a cache's memory."""
    blocks, size = cache.shape[:2]
    return cache.view(-1)[: blocks * size * columns].view(blocks, size, 1, columns)

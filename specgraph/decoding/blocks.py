"""The paged KV cache's blocks: who owns which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph.attention import NULL_BLOCK, AttentionLayer, KVCache
from specgraph.errors import CapacityError, ConfigError


class BlockAllocator:
    """Hands out blocks by number. Block 0 is the null block and never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a KV cache needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = [block for block in range(num_blocks - 1, -1, -1) if block != NULL_BLOCK]
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out when nothing is running."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks.

        Raises:
            CapacityError: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks were asked for, {len(self._free)} of {self.capacity} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            ConfigError: a block was not handed out, or is given back twice; none was taken back.
        """
        if len(set(blocks)) != len(blocks) or not self._owned.issuperset(blocks):
            raise ConfigError(f"KV blocks {list(blocks)} are given back, and not all of them are handed out")
        self._owned.difference_update(blocks)
        self._free.extend(reversed(blocks))


def allocate_caches(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """One zeroed cache per layer, [num_blocks, block_size, num_kv_heads, head_dim] for keys and for values."""

    def one(layer: AttentionLayer) -> torch.Tensor:
        return torch.zeros(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)

    return [KVCache(one(layer), one(layer)) for layer in layers]

"""KV blocks: the size of the cache, and the allocator that hands out block numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specgraph.attention import NULL_BLOCK
from specgraph.errors import CapacityError, ConfigError
from specgraph_run.options import KVCacheDtype

GIB = 1 << 30


def cache_dtype(kv_cache_dtype: KVCacheDtype, model: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's KV caches. model: the model's dtype; an integer one (`NgramHead`) is kept."""
    return torch.float8_e4m3fn if kv_cache_dtype == "fp8" and model.is_floating_point else model


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The number of KV blocks of each cache, and the longest request that they hold."""

    num_blocks: int
    """The number includes the null block."""
    block_size: int
    max_model_len: int
    num_bytes: int
    """The bytes of all caches together."""
    max_num_requests: int = 0
    state_bytes: int = 0
    """The bytes of the states of recurrent layers, for `max_num_requests` requests and the null slot. 0 if the target
    has no such layer."""

    def __str__(self) -> str:
        tokens = (self.num_blocks - 1) * self.block_size
        states = f"; recurrent states of {self.max_num_requests} requests: {_shown(self.state_bytes)}"
        return (
            f"KV cache of {_shown(self.num_bytes)}: {self.num_blocks} blocks of {self.block_size}, {tokens} "
            f"tokens, {tokens / self.max_model_len:.1f} requests of {self.max_model_len}"
            f"{states if self.state_bytes else ''}"
        )


def _shown(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def size_cache(
    bytes_per_token: int,
    *,
    block_size: int,
    max_model_len: int,
    max_num_requests: int,
    memory: int | None,
    num_blocks: int | None = None,
    may_shorten: bool = False,
    scratch_tokens: int = 0,
    state_bytes: int = 0,
) -> CacheSize:
    """Return the cache size for a full batch of the longest requests, or the largest that fits into the memory.

    Args:
        bytes_per_token: keys and values of one token in all layers of target and drafter.
        max_model_len: tokens of the longest request.
        memory: bytes that the caches and states may take; None if unknown.
        num_blocks: the exact number of blocks; `memory` is then ignored.
        scratch_tokens: KV slots of each request behind its longest text (`DraftConfig.scratch_tokens`).
        may_shorten: lower max_model_len to the tokens that fit, instead of raising CapacityError.
        state_bytes: bytes of the recurrent states of one request. Each of `max_num_requests` has states of its own,
            whatever its length, and one more slot is the null slot.

    Raises:
        CapacityError: the states do not fit, or not even one request of max_model_len.
    """
    states = (max_num_requests + 1) * state_bytes if state_bytes else 0
    if memory is not None and states:
        if states >= memory:
            raise CapacityError(
                f"the recurrent states of {max_num_requests} requests take {_shown(states)}, and there are "
                f"{_shown(memory)} for them and the KV cache: lower max_num_requests (each request takes "
                f"{_shown(state_bytes)}), or give more memory"
            )
        memory -= states
    per_block, per_request = bytes_per_token * block_size, -(-(max_model_len + scratch_tokens) // block_size)
    if num_blocks is None:
        num_blocks = 1 + per_request * max_num_requests
        if memory is not None:
            num_blocks = min(num_blocks, memory // per_block)
        if num_blocks <= per_request:
            tokens = max((num_blocks - 1) * block_size - scratch_tokens, 0)
            if not may_shorten or tokens < 1:
                raise CapacityError(
                    f"a KV cache of {(memory or 0) / GIB:.2f} GiB holds {tokens} tokens, and one request may have "
                    f"{max_model_len}: lower max_model_len, or give more memory (kv_memory, memory_fraction)"
                )
            max_model_len = tokens
    return CacheSize(num_blocks, block_size, max_model_len, num_blocks * per_block, max_num_requests, states)


class BlockAllocator:
    """Allocates KV blocks by number. Block 0 is the null block and is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._fresh = NULL_BLOCK + 1
        """The first block that was never handed out. All later ones are free, so no list of them is needed."""
        self._free: list[int] = []
        """Blocks that were given back."""
        self._owned: set[int] = set()

    def reset(self) -> None:
        """Take all blocks back. It also repairs the state after an interrupt within `allocate` or `free`, which can
        leave blocks in no list."""
        self._free, self._owned, self._fresh = [], set(), NULL_BLOCK + 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + self.num_blocks - self._fresh

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated when nothing is running."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises CapacityError, and takes none, if fewer are free."""
        if count > self.num_free:
            raise CapacityError(f"{count} KV blocks were asked for, {self.num_free} of {self.capacity} are free")
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self._fresh, self._fresh + count - len(blocks))
        self._fresh = fresh.stop
        blocks += fresh
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ConfigError, and takes none back, if one was not handed out or comes twice."""
        if len(set(blocks)) != len(blocks) or not self._owned.issuperset(blocks):
            raise ConfigError(f"KV blocks {list(blocks)} are given back, and not all of them are handed out")
        self._owned.difference_update(blocks)
        self._free.extend(reversed(blocks))

"""The core's paged attention, once with device parameters and once with host parameters.

The second is what devices with baked lengths need; every platform with task updates can exercise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention.interface import AttentionLayer, KVCache, StepContext, TaskKey
from specgraph.attention.metadata import AttentionMetadata, HostLengths
from specgraph.errors import UpdateError
from specgraph.platforms import Platform


def advance(metadata: AttentionMetadata, draft_step: Tensor, max_model_len: int, block_size: int) -> None:
    """Move one-row-per-request metadata one token on, in place, and the device-side draft step with it."""
    kernels.advance(
        metadata.seq_lens,
        metadata.positions,
        metadata.slot_mapping,
        draft_step,
        metadata.block_table,
        max_model_len,
        block_size,
    )


def _rotate_and_store(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> Tensor:
    return kernels.rotate_and_store(
        query, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )


def store_rows(layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
    """Rotate keys and write both to the cache at the metadata's slots; nothing attends.

    The cache's layout is the core's own, so this needs no attention backend, and no host parameters.
    """
    # The op rotates a query too; the key stands in for it.
    kernels.rotate_and_store(
        key, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Reads lengths from device tensors: nothing to update between replays."""

    name: str = "paged"
    host_parameters: tuple[str, ...] = ()

    def forward(
        self,
        layer: AttentionLayer,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        context: StepContext,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        metadata = context.metadata
        return kernels.rotate_store_attend(
            query,
            key,
            value,
            layer.rotary,
            metadata.positions,
            metadata.slot_mapping,
            cache.key,
            cache.value,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            query_len=metadata.query_len,
            scale=layer.scale,
            causal=layer.causal,
        )

    def advance(self, metadata: AttentionMetadata, draft_step: Tensor, max_model_len: int, block_size: int) -> None:
        """See `AttentionBackend.advance`."""
        advance(metadata, draft_step, max_model_len, block_size)

    def named_tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}


@dataclass(frozen=True, slots=True)
class PagedHostAttention:
    """Bakes lengths into the captured op; each capture gets a task group, rewritten through the update plan."""

    platform: Platform
    name: str = "paged-host"
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")

    def forward(
        self,
        layer: AttentionLayer,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        context: StepContext,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        metadata = context.metadata
        if context.lengths is None:
            raise UpdateError(
                f"attention '{self.name}' takes host lengths, and none were given for step {context.step}"
            )
        query = _rotate_and_store(layer, query, key, value, cache, metadata)
        out = torch.empty_like(query)

        def attend(lengths: HostLengths) -> None:
            kernels.paged_attention_host(
                query,
                cache.key,
                cache.value,
                metadata.block_table,
                lengths.query_lens,
                lengths.seq_lens,
                scale=layer.scale,
                causal=layer.causal,
                out=out,
            )

        if context.updates is None:
            attend(context.lengths)
        else:
            with self.platform.task_group() as group:
                attend(context.lengths)
            context.updates.add(TaskKey(context.step, index), group, attend)
        return out

    def advance(self, metadata: AttentionMetadata, draft_step: Tensor, max_model_len: int, block_size: int) -> None:
        """Positions and slots stay device parameters: only attention's lengths come from the host."""
        advance(metadata, draft_step, max_model_len, block_size)

    def named_tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

"""The core's paged attention: once with device lengths, once with host parameters.

`PagedHostAttention` is the model for devices whose attention takes lengths from the host; every platform with task
updates can run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.interface import (
    AttentionLayer,
    KVCache,
    StepContext,
    TaskKey,
)
from specgraph.attention.metadata import AttentionMetadata, HostLengths
from specgraph.device import Platform, Support, no, yes
from specgraph.errors import UpdateError


def _rotate_and_store(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> Tensor:
    values = cache.value
    if layer.latent and layer.rotary is not None:  # the same numbers in the same place as the key's: written once
        rotated = layer.rotary.shape[1]
        value, values = value[..., rotated:], values[..., rotated:]
    return ops.rotate_and_store(
        query, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, values
    )


def _supports(layer: AttentionLayer) -> Support:
    if layer.latent and (layer.num_kv_heads != 1 or layer.rotary is None or layer.window or layer.sinks is not None):
        return no(f"latents with {layer.num_kv_heads} key heads, without rotation, or with a window or sinks")
    if layer.causal or layer.is_plain:
        return yes()
    return no("a sliding window, sinks or latents in attention that is not causal")


def store_rows(layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
    """Rotate keys and write both to the cache at the metadata's slots; nothing attends.

    The cache has the core's own layout, so this needs neither an attention backend nor host parameters.
    """
    # The op also rotates a query; it gets the key, and its result is not used.
    ops.rotate_and_store(
        key, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )


def move_rows(caches: Sequence[KVCache], from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy keys and values of all layers from slot to slot, int64 [M]; slot 0 to slot 0 where nothing moves."""
    for cache in caches:
        ops.move_kv(cache.key, cache.value, from_slots, to_slots)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Paged attention with device lengths: nothing to update between replays."""

    name: str = "paged"
    host_parameters: tuple[str, ...] = ()
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    """Of KV caches, beside the dtype of the model."""

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
        if layer.is_plain and metadata.ancestors is None:
            return ops.rotate_store_attend(
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
        query = _rotate_and_store(layer, query, key, value, cache, metadata)
        placed, scale = (metadata.block_table, metadata.seq_lens), layer.scale
        if metadata.ancestors is not None:
            return ops.tree_attention(
                query, cache.key, cache.value, *placed, metadata.ancestors, tree_len=metadata.tree_len, scale=scale
            )
        rows, query_len = (*placed, metadata.query_start_loc), metadata.query_len
        if layer.latent:
            return ops.paged_attention(query, cache.key, cache.key, *rows, query_len=query_len, scale=scale)
        window = layer.window or 0
        return ops.windowed_attention(
            query, cache.key, cache.value, *rows, layer.sinks, query_len=query_len, scale=scale, window=window
        )

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`: every shape; windows, sinks and latents with causal attention."""
        return _supports(layer)

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `TreeAttention.supports_trees`: every shape without a window or sinks."""
        return yes() if layer.is_plain else no("draft trees in a layer with a sliding window, sinks or latents")

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Empty: it keeps no tensors of its own."""
        return {}


@dataclass(frozen=True, slots=True)
class PagedHostAttention:
    """Paged attention with host parameters: each captured op is a task group, rewritten through the update plan."""

    platform: Platform
    name: str = "paged-host"
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)

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
                f"attention '{self.name}' takes lengths from the host, and none were given for step {context.step}"
            )
        out = query.new_empty(query.shape)
        if not layer.is_plain:
            query = _rotate_and_store(layer, query, key, value, cache, metadata)

        def attend(lengths: HostLengths) -> None:
            keys = (cache.key, cache.value, metadata.block_table, lengths.query_lens, lengths.seq_lens)
            if layer.is_plain:
                stored = (key, value, layer.rotary, metadata.positions, metadata.slot_mapping)
                ops.rotate_store_attend_host(query, *stored, *keys, scale=layer.scale, causal=layer.causal, out=out)
            elif layer.latent:
                ops.paged_attention_host(query, *keys, scale=layer.scale, out=out)
            else:
                ops.windowed_attention_host(
                    query, *keys, layer.sinks, scale=layer.scale, window=layer.window or 0, out=out
                )

        if context.updates is None:
            attend(context.lengths)
        else:
            with self.platform.task_group() as group:
                attend(context.lengths)
            context.updates.add(TaskKey(context.step, index), group, lambda lengths: partial(attend, lengths))
        return out

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`: every shape; windows, sinks and latents with causal attention."""
        return _supports(layer)

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Empty: it keeps no tensors of its own."""
        return {}

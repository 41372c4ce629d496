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
from specgraph.attention.interface import AttentionLayer, StepContext, TaskKey
from specgraph.attention.metadata import AttentionMetadata
from specgraph.device import Platform, Support, no, yes
from specgraph.errors import UpdateError
from specgraph.ops import HostLengths, KVCache, Mask, NewRows

FP8_CACHE = (torch.float8_e4m3fn,)

NO_ANCESTOR_MASK = no("it has no ancestor mask, which draft trees need; --attention device has one")
"""The answer of a backend that runs no draft trees."""


def _inputs(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> tuple[Tensor, KVCache, NewRows | None]:
    """Return query, cache and new rows for an attention op. Latent rows are stored here: values are key columns."""
    new = NewRows(key, value, layer.rotary, metadata.positions, metadata.slot_mapping)
    if not layer.latent or layer.rotary is None:
        return query, cache, new
    rotated = layer.rotary.shape[1]  # the same numbers in the same place as the key's: written once
    query = ops.rotate_and_store(
        query, new._replace(value=value[..., rotated:]), KVCache(cache.key, cache.value[..., rotated:])
    )
    return query, KVCache(cache.key, cache.key), None


def store_rows(layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
    """Rotate keys and write both to the cache at the metadata's slots; nothing attends.

    The cache has the core's own layout, so this needs neither an attention backend nor host parameters.
    """
    # The op also rotates a query; it gets the key, and its result is not used.
    ops.rotate_and_store(key, NewRows(key, value, layer.rotary, metadata.positions, metadata.slot_mapping), cache)


def move_rows(caches: Sequence[KVCache], from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy keys and values of all layers from slot to slot, int64 [M]; slot 0 to slot 0 where nothing moves."""
    for cache in caches:
        ops.move_kv(cache.key, cache.value, from_slots, to_slots)


class _Paged:
    """The answers that both have in common."""

    __slots__ = ()
    after_advance = None

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`: every shape; windows, sinks and latents with causal attention."""
        has_mask = layer.window or layer.sinks is not None
        if layer.latent and (layer.num_kv_heads != 1 or layer.rotary is None or has_mask):
            return no(f"latents with {layer.num_kv_heads} key heads, without rotation, or with a window or sinks")
        if layer.causal or layer.is_plain:
            return yes()
        return no("a sliding window, sinks or latents in attention that is not causal")

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: it keeps no tensors of its own."""
        return {}


@dataclass(frozen=True, slots=True)
class PagedAttention(_Paged):
    """Paged attention with device lengths: nothing to update between replays."""

    name: str = "paged"
    host_parameters: tuple[str, ...] = ()
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = FP8_CACHE

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
        words, tree_len = metadata.ancestors, metadata.tree_len
        mask = Mask(layer.causal and words is None, layer.window or 0, layer.sinks, words, tree_len)
        query, cache, new = _inputs(layer, query, key, value, cache, metadata)
        return ops.paged_attention(query, cache, metadata.block_table, metadata.lengths, mask, new, scale=layer.scale)

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports_trees`: every shape without a window or sinks."""
        return yes() if layer.is_plain else no("draft trees in a layer with a sliding window, sinks or latents")


@dataclass(frozen=True, slots=True)
class PagedHostAttention(_Paged):
    """Paged attention with host parameters: each captured op is a task group, rewritten through the update plan."""

    platform: Platform
    name: str = "paged-host"
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = FP8_CACHE

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
        query, cache, new = _inputs(layer, query, key, value, cache, metadata)
        mask = Mask(layer.causal, layer.window or 0, layer.sinks)

        def attend(lengths: HostLengths) -> None:
            ops.paged_attention_host(query, cache, metadata.block_table, lengths, mask, new, scale=layer.scale, out=out)

        if context.updates is None:
            attend(context.lengths)
        else:
            with self.platform.task_group() as group:
                attend(context.lengths)
            context.updates.add(TaskKey(context.step, index), group, lambda lengths: partial(attend, lengths))
        return out

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports_trees`."""
        return NO_ANCESTOR_MASK

"""The core's paged attention, with device lengths (`PagedAttention`) and with host parameters (`PagedHostAttention`).

`PagedHostAttention` is the example for devices with attention that takes lengths from the host. Every platform with
task updates can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.context_parallel import (
    all_heads,
    lengths_by_row,
    own_heads,
    own_slots,
    table_by_row,
)
from specgraph.attention.interface import AttentionLayer, ForwardContext, TaskKey
from specgraph.attention.metadata import AttentionMetadata
from specgraph.device import Platform, Support, no, yes
from specgraph.errors import ConfigError, UpdateError
from specgraph.ops import HostLengths, KVCache, Mask, NewRows
from specgraph.ops.kv_cache import rotate_pairs
from specgraph.ops.tensor_forms import check_forms, dtype_of
from specgraph.parallel import ContextParallel
from specgraph.user_code import NONSENSE, explained
from specgraph.validation import check, checked

P = ParamSpec("P")

FP8_CACHE = (torch.float8_e4m3fn,)

NO_ANCESTOR_MASK = no("it has no ancestor mask, which draft trees need; --attention device has one")
"""The result of `supports_trees` if a backend runs no draft trees."""


def _inputs(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> tuple[Tensor, KVCache, NewRows | None]:
    """Return the query, the cache and the new rows for an attention op.

    Rows of a rotated latent layer are stored here. The op then gets no new rows, and reads values from the keys.
    """
    new = NewRows(key, value, layer.rotary, metadata.positions, metadata.slot_mapping)
    if not layer.latent or layer.rotary is None:
        return query, cache, new
    if layer.latent_first:
        query, key = (rotate_pairs(x, layer.rotary, metadata.positions) for x in (query, key))
        cache = KVCache(cache.key, cache.key)
        stored = NewRows(key, key, None, metadata.positions, metadata.slot_mapping)
        return ops.rotate_and_store(query, stored, cache), cache, None
    rotated = layer.rotary.shape[1]  # the later columns of key and value are equal and share their memory
    query = ops.rotate_and_store(
        query, new._replace(value=value[..., rotated:]), KVCache(cache.key, cache.value[..., rotated:])
    )
    return query, KVCache(cache.key, cache.key), None


def _part_inputs(
    layer: AttentionLayer, ranks: ContextParallel, query: Tensor, key: Tensor, value: Tensor, cache: KVCache,
    metadata: AttentionMetadata,
) -> tuple[Tensor, KVCache]:  # fmt: skip
    """Store this rank's rows. Returns the rotated queries of all ranks, and the cache."""
    metadata = replace(metadata, slot_mapping=own_slots(metadata.slot_mapping, ranks))
    query, cache, new = _inputs(layer, all_heads(query, ranks), key, value, cache, metadata)
    return query if new is None else ops.rotate_and_store(query, new, cache), cache


def store_rows(layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
    """Rotate keys, and write keys and values to the cache at the metadata's slots, without attention.

    The cache has the core's own layout, so no attention backend and no host parameters are needed.
    """
    # The op also rotates a query. It gets the key as one, and the result is not used.
    slots = own_slots(metadata.slot_mapping, layer.ranks)
    ops.rotate_and_store(key, NewRows(key, value, layer.rotary, metadata.positions, slots), cache)


_ROWS = {
    "query_start_loc": "int32 [ends]",
    "seq_lens": "int32 [R]",
    "positions": "int64 [T]",
    "slot_mapping": "int64 [T]",
    "block_table": "int32 [R, blocks]",
    "ancestors": "int64 [T] or None",
}


def _explained(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap `forward`: if it fails, an error names the wrong argument. A pass that succeeds pays nothing for it."""

    look: Callable[..., None] = _check_pass

    @wraps(forward)
    def call(*args: P.args, **given: P.kwargs) -> Tensor:
        with explained((*NONSENSE, IndexError, RuntimeError), partial(look, *args, **given)):
            return forward(*args, **given)

    return call


@checked
def _check_pass(
    self: Any, layer: AttentionLayer, index: int, query: Tensor, key: Tensor, value: Tensor, cache: KVCache,
    context: ForwardContext,
) -> None:  # fmt: skip
    """Raise ConfigError if an argument doesn't fit `AttentionBackend.forward`."""
    dtype, keys = dtype_of(query), f"{layer.num_kv_heads}, {layer.head_dim}"
    given = {"query": query, "key": key, "value": value, "key cache": cache.key, "value cache": cache.value}
    blocks = f"any [num_blocks, block_size, {keys}]"
    rows = f"{dtype} [T, {keys}]"
    forms = {"query": f"floats [T, {layer.num_heads}, {layer.head_dim}]", "key": rows, "value": rows}
    forms |= {"key cache": blocks, "value cache": blocks}
    metadata = {name: getattr(context.metadata, name) for name in _ROWS}
    check_forms(f"attention '{self.name}'", given | metadata, forms | _ROWS)
    check("query_len", context.metadata.query_len, int)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        raise ConfigError(f"attention '{self.name}' writes a cache, which has no gradient: call it in torch.no_grad()")


class _Paged:
    """The common base of both backends."""

    __slots__ = ()
    after_advance = None

    @checked
    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`. Every shape is supported. Windows, sinks and latents need causal
        attention."""
        if layer.sinks is not None and layer.ranks is not None and layer.ranks.gathers_heads:
            return no("attention sinks where ranks share keys and each has query heads of its own")
        has_window_or_sinks = layer.window or layer.sinks is not None
        if layer.latent and (layer.num_kv_heads != 1 or layer.rotary is None or has_window_or_sinks):
            return no(f"latents with {layer.num_kv_heads} key heads, without rotation, or with a window or sinks")
        if layer.causal or replace(layer, ranks=None).is_plain:
            return yes()
        return no("a sliding window, sinks or latents in attention that is not causal")

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return an empty mapping: the backend keeps no tensors."""
        return {}


@dataclass(frozen=True, slots=True)
class PagedAttention(_Paged):
    """Paged attention with device lengths: nothing is updated between replays."""

    name: str = "paged"
    host_parameters: tuple[str, ...] = ()
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = FP8_CACHE

    @_explained
    def forward(
        self,
        layer: AttentionLayer,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        context: ForwardContext,
    ) -> Tensor:
        metadata = context.metadata
        words, tree_len = metadata.ancestors, metadata.tree_len
        mask = Mask(layer.causal and words is None, layer.window or 0, layer.sinks, words, tree_len)
        if (ranks := layer.ranks) is not None:
            dtype = query.dtype
            query, cache = _part_inputs(layer, ranks, query, key, value, cache, metadata)
            table, at = metadata.block_table, (ranks.rank, ranks.size)
            part = ops.attend_part(query, cache, table, metadata.lengths, mask, *at, scale=layer.scale)
            return own_heads(part, layer.num_heads, ranks, dtype)
        query, cache, new = _inputs(layer, query, key, value, cache, metadata)
        return ops.paged_attention(query, cache, metadata.block_table, metadata.lengths, mask, new, scale=layer.scale)

    @checked
    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports_trees`. Windows, sinks and latents are not supported."""
        return (
            yes()
            if replace(layer, ranks=None).is_plain
            else no("draft trees in a layer with a sliding window, sinks or latents")
        )


@dataclass(frozen=True, slots=True)
class PagedHostAttention(_Paged):
    """Paged attention with host parameters: each captured op is a task group, which the update plan rewrites."""

    platform: Platform
    name: str = "paged-host"
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = FP8_CACHE

    @_explained
    def forward(
        self,
        layer: AttentionLayer,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        context: ForwardContext,
    ) -> Tensor:
        metadata = context.metadata
        if context.lengths is None:
            raise UpdateError(
                f"attention '{self.name}' takes lengths from the host, and none were given for step {context.step}"
            )
        ranks, dtype = layer.ranks, query.dtype
        if ranks is None:
            out = query.new_empty(query.shape)
            query, cache, new = _inputs(layer, query, key, value, cache, metadata)
            mask = Mask(layer.causal, layer.window or 0, layer.sinks)

            def attend(now: HostLengths) -> None:
                table = metadata.block_table
                ops.paged_attention_host(query, cache, table, now, mask, new, scale=layer.scale, out=out)

        else:
            query, cache = _part_inputs(layer, ranks, query, key, value, cache, metadata)
            by_row = table_by_row(metadata, context.lengths, query.shape[0])
            out = query.new_empty(*query.shape[:2], layer.head_dim + 1, dtype=torch.promote_types(dtype, torch.float32))

            def attend(now: HostLengths) -> None:
                seen = lengths_by_row(now, layer.causal, ranks).seq_lens
                ops.attend_part_host(query, cache, by_row, seen, scale=layer.scale, out=out)

        if context.updates is None:
            attend(context.lengths)
        else:
            with self.platform.task_group() as group:
                attend(context.lengths)
            context.updates.add(TaskKey(context.step, index), group, lambda lengths: partial(attend, lengths))
        return out if ranks is None else own_heads(out, layer.num_heads, ranks, dtype)

    @checked
    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `AttentionBackend.supports`. Windows and sinks are not supported if ranks share keys."""
        if layer.ranks is not None and (layer.window or layer.sinks is not None):
            return no("a sliding window or sinks with keys that ranks share; attention with device lengths takes them")
        return _Paged.supports(self, layer, dtype, block_size)

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        return NO_ANCESTOR_MASK

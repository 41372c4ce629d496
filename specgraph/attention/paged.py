"""The core's paged attention: once with device lengths, once with host parameters; and choosing attention by name.

`PagedHostAttention` is the model for devices whose attention takes lengths from the host; every platform with task
updates can run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention.interface import AttentionBackend, AttentionLayer, KVCache, StepContext, TaskKey
from specgraph.attention.metadata import AttentionMetadata, HostLengths
from specgraph.errors import ConfigError, UpdateError
from specgraph.platforms import Platform


def _rotate_and_store(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata
) -> Tensor:
    return kernels.rotate_and_store(
        query, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )


def store_rows(layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
    """Rotate keys and write both to the cache at the metadata's slots; nothing attends.

    The cache has the core's own layout, so this needs neither an attention backend nor host parameters.
    """
    # The op also rotates a query; it gets the key, and its result is not used.
    kernels.rotate_and_store(
        key, key, value, layer.rotary, metadata.positions, metadata.slot_mapping, cache.key, cache.value
    )


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Paged attention with device lengths: nothing to update between replays."""

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

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Empty: it keeps no tensors of its own."""
        return {}


@dataclass(frozen=True, slots=True)
class PagedHostAttention:
    """Paged attention with host parameters: each captured op is a task group, rewritten through the update plan."""

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
                f"attention '{self.name}' takes lengths from the host, and none were given for step {context.step}"
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

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Empty: it keeps no tensors of its own."""
        return {}


def choose_attention(name: str, platform: Platform) -> AttentionBackend:
    """The attention backend of that name.

    Args:
        name: "device" or "host": the core's paged attention, with lengths from device tensors or from host integers.
            A name that the platform offers (`Platform.attention_backends`). "auto": the first that the platform
            offers, "device" where it offers none.

    Raises:
        ConfigError: there is no attention of that name on this platform.
        UnsupportedError: a package that it needs is not installed.
    """
    own = platform.attention_backends()
    if name == "auto":
        name = next(iter(own), "device")
    if name in own:
        return own[name](platform)
    if name == "device":
        return PagedAttention()
    if name == "host":
        return PagedHostAttention(platform)
    offered = ", ".join(["auto", "device", "host", *own])
    raise ConfigError(f"no attention '{name}' on platform '{platform.info.name}'; there are {offered}")

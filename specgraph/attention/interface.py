"""What an attention backend offers to the drafting engine, and what a model asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from specgraph.attention.metadata import AttentionMetadata, HostLengths
from specgraph.platforms import TaskGroup


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape of one attention layer, and its rotary table."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on query-key products, usually head_dim ** -0.5."""
    rotary: Tensor | None = None
    """float32 [max_positions, rotary_dim]: cos in the first half, sin in the second; None for no rotation."""
    causal: bool = True


class KVCache(NamedTuple):
    """One layer's paged keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key.shape[1]


class TaskKey(NamedTuple):
    """Which captured op a host parameter belongs to."""

    step: int
    layer: int
    op: str = "attention"


class UpdateSink(Protocol):
    """Collects, during capture, how to rewrite the host parameters of each captured op."""

    def add(self, key: TaskKey, group: TaskGroup, rewrite: Callable[[HostLengths], None]) -> None:
        """`rewrite` issues the op again, same tensors, with the given lengths."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What one forward pass knows beside its rows: metadata, and host lengths where attention needs them."""

    metadata: AttentionMetadata
    step: int = 0
    """Which draft step this pass is (0 for the first, and for a target)."""
    lengths: HostLengths | None = None
    """Only for attention with host parameters."""
    updates: UpdateSink | None = None
    """Only in capture, for attention with host parameters."""


class AttentionBackend(Protocol):
    """Paged attention on one platform.

    `host_parameters` names what is baked into the captured op ("seq_lens", "query_lens"); empty when the op reads
    everything from device tensors. With host parameters, `StepContext.lengths` is always given, and the platform must
    have `task_update` to capture it.
    """

    @property
    def name(self) -> str: ...

    @property
    def host_parameters(self) -> tuple[str, ...]: ...

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
        """Rotate query and key, write key and value to the cache, attend.

        Args:
            layer: shapes, scale and rotary table.
            index: the layer's number among the caches of its model.
            query: [T, num_heads, head_dim], not rotated yet.
            key, value: [T, num_kv_heads, head_dim], key not rotated yet.
            cache: this layer's cache, written at `slot_mapping` (NULL_SLOT writes nothing).
            context: the pass's metadata.

        Returns:
            [T, num_heads, head_dim] in the query's dtype. Row i of a request with q rows sees the first
            `seq_len - q + 1 + i` keys (all `seq_len` if not causal). Rows of requests with seq_len 0 are zero.
        """
        ...

    def advance(self, metadata: AttentionMetadata, draft_step: Tensor, max_model_len: int, block_size: int) -> None:
        """Move one-row-per-request metadata one token on, in place, with device work only.

        Adds 1 to `draft_step` (int64 [1]), and moves whatever state the backend derives from positions. Padded
        requests stay inert.
        """
        ...

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Constants of its own that captured ops read (masks, ...), by name: part of the read-set."""
        ...


class Attend(Protocol):
    """What a model calls in its attention layers: rotation, cache write and attention in one."""

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Shapes as in `AttentionBackend.forward`; `index` counts the model's attention layers from 0."""
        ...


class Store(Protocol):
    """What a model calls to put rows into its KV cache that attend to nothing: rotation and cache write only."""

    def __call__(self, index: int, key: Tensor, value: Tensor) -> None:
        """key, value: [T, num_kv_heads, head_dim], key not rotated yet; `index` as in `Attend`."""
        ...


AttentionFactory = Callable[..., AttentionBackend]
"""Called with the platform."""


def bind(
    backend: AttentionBackend, layers: Sequence[AttentionLayer], caches: Sequence[KVCache], context: StepContext
) -> Attend:
    """The `attend` callable of one forward pass."""

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return backend.forward(layers[index], index, query, key, value, caches[index], context)

    return attend


def named_cache_tensors(caches: Sequence[KVCache], prefix: str) -> Mapping[str, Tensor]:
    """The cache tensors by dotted name, for the read-set."""
    named: dict[str, Tensor] = {}
    for i, cache in enumerate(caches):
        named[f"{prefix}.{i}.key"], named[f"{prefix}.{i}.value"] = cache
    return named

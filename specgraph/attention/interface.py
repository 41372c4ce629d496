"""The attention interface: what a backend implements, and what a model calls in its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention.metadata import AttentionMetadata
from specgraph.device import Support, TaskGroup
from specgraph.errors import ConfigError
from specgraph.ops import HostLengths, KVCache
from specgraph.ops.tensor_forms import check_forms
from specgraph.parallel import ContextParallel
from specgraph.validation import Count, checked_fields, shown


@checked_fields
@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape of one attention layer, and its rotary table."""

    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    scale: float
    """Factor on query-key products, usually head_dim ** -0.5."""
    rotary: Tensor | None = None
    """float32 [max_positions, rotary_dim]: cos in the first half, sin in the second; None for no rotation, which a
    capture tells unless `no_rotary` is set."""
    causal: bool = True
    window: Count | None = None
    """Keys that a row sees at most, its own included: those of the last `window` positions. None for all. Only with
    causal attention."""
    sinks: Tensor | None = None
    """[num_heads]: scores without a key and a value that take part in each head's softmax (gpt-oss); None for none."""

    latent: bool = False
    """Multi-head latent attention: `num_kv_heads` is 1, and a row's key, [rotated part, latent], is also its value. It
    is stored once: `KVCache.value` is `KVCache.key`. The first rotary_dim columns of the output mean nothing."""

    latent_first: bool = False
    """A latent row is [latent, rotated part], as engines store it: elements 2i and 2i + 1 of the rotated part turn
    together, and the last rotary_dim columns of the output mean nothing."""

    ranks: ContextParallel | None = None
    """The ranks that share the keys of each request; None where this one has them all."""

    no_rotary: bool = False
    """No `rotary` is meant: the model has none (ALiBi, learned positions), or its attention rotates by a table of its
    own."""

    def __post_init__(self) -> None:
        given = {"rotary": self.rotary, "sinks": self.sinks}
        forms = {"rotary": "floats [max_positions, rotary_dim] or None", "sinks": f"floats [{self.num_heads}] or None"}
        check_forms("AttentionLayer", given, forms)
        columns = 0 if self.rotary is None else self.rotary.shape[1]
        if columns > self.head_dim or columns % 2:
            raise ConfigError(
                f"AttentionLayer: rotary has {columns} columns: give an even number, at most head_dim = {self.head_dim}"
            )
        if self.rotary is not None and self.no_rotary:
            raise ConfigError("AttentionLayer: rotary is given, and no_rotary says that there is none: leave out one")

    @property
    def is_plain(self) -> bool:
        """Return whether it has neither a window nor sinks, and keeps all keys, and values of its own."""
        return self.window is None and self.sinks is None and not self.latent and self.ranks is None

    @property
    def context_size(self) -> int:
        """Return how many ranks share the keys of each request: a block has that many times fewer cells on each."""
        return 1 if self.ranks is None else self.ranks.size


class TaskKey(NamedTuple):
    """Names one captured op with host parameters: (draft step, layer, op)."""

    step: int
    layer: int
    op: str = "attention"


PrepareUpdate = Callable[[HostLengths], Callable[[], None]]
"""Makes and checks the host arguments of one captured op, before its task update begins, and returns the function that
issues the op again on the same tensors with them. Raises UpdateError where the op can't take the lengths."""


class UpdateSink(Protocol):
    """Receives, during capture, each op with host parameters and the function that prepares its updates."""

    def add(self, key: TaskKey, group: TaskGroup, prepare: PrepareUpdate) -> None:
        """Register one op, captured in `group`."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The context of one forward pass: all that it knows besides its rows."""

    metadata: AttentionMetadata
    step: int = 0
    """The draft step of this pass: 0 for the first, and always 0 for a target."""
    lengths: HostLengths | None = None
    """The lengths as Python integers; given only to attention with host parameters."""
    updates: UpdateSink | None = None
    """The receiver of captured tasks; given only during capture, to attention with host parameters."""


AfterAdvance = Callable[[AttentionMetadata, Tensor], None]
"""(metadata of one row per request, already moved on; int64 [1], the number of the step that comes next). Requests with
seq_len 0 are padding."""


class AttentionBackend(Protocol):
    """Paged attention on one platform.

    An attention op learns sequence lengths in one of two ways. With *device lengths* it reads them from the tensors of
    `AttentionMetadata`, and nothing has to be rewritten between replays. With *host parameters* they are Python
    integers, baked into the captured task; `host_parameters` names them ("seq_lens", "query_lens"), the platform must
    have `task_update` to capture the op, and `ForwardContext.lengths` is always given.
    """

    @property
    def name(self) -> str: ...

    @property
    def host_parameters(self) -> tuple[str, ...]:
        """Return the names of the arguments that are baked into a captured op; empty with device lengths."""
        ...

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
        """Rotate query and key, write key and value to the cache, attend.

        Args:
            layer: shapes, scale and rotary table.
            index: the layer's number among the caches of its model.
            query: [T, num_heads, head_dim], not rotated yet.
            key, value: [T, num_kv_heads, head_dim], key not rotated yet.
            cache: this layer's cache, written at `slot_mapping` (NULL_SLOT writes nothing).
            context: the pass's metadata.

        Returns:
            [T, num_heads, head_dim] in the query's dtype. Row i of a request with query_len rows sees the first
            `seq_len - query_len + 1 + i` keys (all `seq_len` keys if not causal), and of those the last `layer.window`.
            Rows of requests with seq_len 0 are zero.
        """
        ...

    @property
    def preferred_block_size(self) -> int:
        """Return the tokens per KV block that suit it best; used where nobody asks for a size."""
        ...

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """Return whether it runs a layer, and if not, why: `no` names what was asked and what it takes.

        Args:
            layer: heads, head_dim and mask of the layer. A backend without windows, sinks, latents or keys that ranks
                share must refuse a layer that has them (`AttentionLayer.is_plain`).
            dtype: of queries, keys, values and the KV cache.
            block_size: tokens per KV block.
        """
        ...

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """Return whether it also runs the rows of a draft tree, whose metadata has `ancestors`, and if not, why.

        Row i of a request then sees the first `seq_len - tree_len` keys and, of the `tree_len` keys after those, the
        ones whose bit is set in its word; `causal` does not matter. Arguments as in `supports`.
        """
        ...

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of KV caches that it takes beside the dtype of the model."""
        ...

    @property
    def after_advance(self) -> AfterAdvance | None:
        """Return the hook of a backend with state of its own that depends on positions (a split schedule, a mask); else
        None.

        Between two draft steps the core moves the metadata one token on (`specgraph.attention.advance`). State that the
        backend derived from the old positions is then stale: the later steps of vLLM #41162 read out of bounds that
        way. The hook brings it up to date, in place and with device work only: the call is captured.
        """
        ...

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of the backend's own that captured ops read (masks, ...), by name: part of the read-set."""
        ...


class Attend(Protocol):
    """The callable that a model uses in its attention layers: rotation, cache write and attention in one call."""

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Shapes as in `AttentionBackend.forward`; `index` counts the model's attention layers from 0."""
        ...


class Store(Protocol):
    """The callable that a model uses to write rows into its KV cache without attending: rotation and cache write."""

    def __call__(self, index: int, key: Tensor, value: Tensor) -> None:
        """key, value: [T, num_kv_heads, head_dim], key not rotated yet; `index` as in `Attend`."""
        ...


AttentionFactory = Callable[..., AttentionBackend]
"""Makes a backend; called with the platform."""


def attend_with(
    backend: AttentionBackend, layers: Sequence[AttentionLayer], caches: Sequence[KVCache], context: ForwardContext
) -> Attend:
    """Return the `attend` callable of one forward pass."""

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        try:
            layer, cache = layers[index], caches[index]
        except (IndexError, TypeError):
            raise ConfigError(
                f"the model attends as layer {shown(index)}; it has {len(layers)} attention layer(s), from 0"
            ) from None
        out: Any = backend.forward(layer, index, query, key, value, cache, context)
        if getattr(out, "shape", None) != query.shape or out.dtype != query.dtype:
            got = f"{list(out.shape)} {out.dtype}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ConfigError(
                f"attention '{backend.name}' returned {got} for layer {index}; expected the query's shape and dtype, "
                f"{list(query.shape)} {query.dtype}"
            )
        return out

    return attend


def named_cache_tensors(caches: Sequence[KVCache], prefix: str) -> Mapping[str, Tensor]:
    """Return the cache tensors by dotted name, for the read-set."""
    named: dict[str, Tensor] = {}
    for i, cache in enumerate(caches):
        named[f"{prefix}.{i}.key"], named[f"{prefix}.{i}.value"] = cache
    return named

"""The attention interface: the protocol of a backend, and the functions that a model calls in its layers."""

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
    """The factor on query-key products, usually head_dim ** -0.5."""
    rotary: Tensor | None = None
    """float32 [max_positions, rotary_dim]: cos in the first half of the columns, sin in the second. None if nothing is
    rotated; a capture then logs a warning unless `no_rotary` is set."""
    causal: bool = True
    window: Count | None = None
    """A row sees the keys of the last `window` positions, its own included. None if it sees all of them. Only with
    causal attention."""
    sinks: Tensor | None = None
    """[num_heads]: a score per head that takes part in the softmax without a key and a value (gpt-oss). None if there
    are no sinks."""

    latent: bool = False
    """Multi-head latent attention: `num_kv_heads` is 1, and a row's key, [rotated part, latent], is also its value. It
    is stored once: `KVCache.value` is `KVCache.key`. The first rotary_dim columns of the output mean nothing."""

    latent_first: bool = False
    """A latent row is [latent, rotated part], as host engines store it. Elements 2i and 2i + 1 of the rotated part are
    rotated as a pair. The last rotary_dim columns of the output mean nothing."""

    ranks: ContextParallel | None = None
    """The ranks that share out the keys of each request. None if this rank has all keys."""

    no_rotary: bool = False
    """True if `rotary` is None on purpose: the model has no rotation (ALiBi, learned positions), or its attention
    rotates by a table of its own."""

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
        """Return whether the layer has no window, no sinks, no latents and no ranks that share its keys."""
        return self.window is None and self.sinks is None and not self.latent and self.ranks is None

    @property
    def context_size(self) -> int:
        """Return the number of ranks that share the keys of each request. A block of B tokens has B / `context_size`
        cells on each rank."""
        return 1 if self.ranks is None else self.ranks.size


class TaskKey(NamedTuple):
    """The name of one captured op with host parameters: (draft step, layer, op)."""

    step: int
    layer: int
    op: str = "attention"


PrepareUpdate = Callable[[HostLengths], Callable[[], None]]
"""Prepares the update of one captured op: it makes and checks the op's host arguments before the task update begins.
Returns the function that issues the op again, with these arguments and the same tensors. Raises UpdateError if the op
can't take the lengths."""


class UpdateSink(Protocol):
    """Receives each op with host parameters during its capture, with the function that prepares the op's updates."""

    def add(self, key: TaskKey, group: TaskGroup, prepare: PrepareUpdate) -> None:
        """Register one op that was captured in `group`."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The context of one forward pass: its metadata, draft step and host lengths."""

    metadata: AttentionMetadata
    step: int = 0
    """The draft step of this pass. It is always 0 for a target."""
    lengths: HostLengths | None = None
    """The lengths as Python integers. None unless attention has host parameters."""
    updates: UpdateSink | None = None
    """The receiver of captured tasks. None unless attention has host parameters and a capture is running."""


class AttentionBackend(Protocol):
    """Paged attention on one platform.

    `Drafter` requires `name`, `host_parameters`, `forward`, `after_advance` and `named_tensors`, and for draft trees
    `supports`, `supports_trees` and `cache_dtypes` too. `choose_attention` takes backends with all members.

    An attention op gets sequence lengths in one of two ways:

    - *Device lengths*: it reads them from the tensors of `AttentionMetadata`, which are written in place, also from
      inside the graph. Replays need no rewriting.
    - *Host parameters*: they are Python integers that are baked into the captured task. `host_parameters` names them
      ("seq_lens", "query_lens"), and `ForwardContext.lengths` always has them. An `UpdatePlan` rewrites them between
      replays, so the platform must have `task_update` to capture the op.
    """

    @property
    def name(self) -> str: ...

    @property
    def host_parameters(self) -> tuple[str, ...]:
        """Return the names of the arguments that are baked into a captured op. Empty with device lengths."""
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
        """Rotate query and key, write key and value to the cache, and attend.

        Args:
            layer: shapes, scale and rotary table.
            index: the layer's number among the attention layers of its model.
            query: [T, num_heads, head_dim], not rotated yet.
            key, value: [T, num_kv_heads, head_dim]; the key is not rotated yet.
            cache: this layer's cache, written at `slot_mapping` (NULL_SLOT writes nothing).
            context: the metadata of the pass.

        Returns:
            [T, num_heads, head_dim] in the query's dtype. Row i of a request with query_len rows sees the first
            `seq_len - query_len + 1 + i` keys, or all `seq_len` keys if the layer is not causal. With a window it sees
            only the last `layer.window` of these keys. Rows of requests with seq_len 0 are zero.
        """
        ...

    @property
    def preferred_block_size(self) -> int:
        """Return the best number of tokens per KV block. It is used if the caller names none."""
        ...

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """Return whether the backend runs a layer. If not, the reason names the refused property and the supported
        ones.

        Args:
            layer: a backend without windows, sinks, latents or keys that ranks share must refuse a layer that has them
                (`AttentionLayer.is_plain`).
            dtype: the dtype of queries, keys, values and the KV cache.
            block_size: tokens per KV block.
        """
        ...

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """Return whether the backend also runs the rows of draft trees, and if not, why. Arguments as in `supports`.

        The metadata then has `ancestors`, a word per row. A row sees the first `seq_len - tree_len` keys. Of the
        `tree_len` keys after them it sees key i if bit i of its word is set. `causal` does not matter.
        """
        ...

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of KV caches that the backend takes besides the model's own dtype."""
        ...

    @property
    def after_advance(self) -> Callable[[AttentionMetadata, Tensor], None] | None:
        """Return a hook, (metadata, draft_step), that updates the backend's own state between two draft steps. None if
        the backend has no state that depends on positions, such as a split schedule or a mask.

        Between two draft steps the core moves the metadata, of one row per request, one token on (`ops.advance`), and
        `draft_step`, int64 [1], to the next draft step. State from the old positions is then stale: this is why the
        later steps of vLLM #41162 read out of bounds. The hook must update the state in place and with device work
        only, since the call is captured.
        """
        ...

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return the backend's own tensors that captured ops read, such as masks, by name: they join the read set."""
        ...


class Attend(Protocol):
    """The callable that a model uses in its attention layers: rotation, cache write and attention in one call."""

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in one layer. Shapes as in `AttentionBackend.forward`; `index` counts attention layers from 0."""
        ...


class Store(Protocol):
    """The callable that a model uses to write rows into its KV cache without attending: rotation and cache write."""

    def __call__(self, index: int, key: Tensor, value: Tensor) -> None:
        """Store rows of one layer. key, value: [T, num_kv_heads, head_dim], the key not rotated yet. `index` as in
        `Attend`."""
        ...


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
    """Return the cache tensors by dotted name, for the read set."""
    named: dict[str, Tensor] = {}
    for i, cache in enumerate(caches):
        named[f"{prefix}.{i}.key"], named[f"{prefix}.{i}.value"] = cache
    return named

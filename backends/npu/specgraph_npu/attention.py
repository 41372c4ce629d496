"""Paged attention with host parameters: each captured op in a task group of its own, rewritten by the update plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgraph.attention import AttentionLayer, HostLengths, KVCache, StepContext, TaskKey
from specgraph.errors import ConfigError, UnsupportedError, UpdateError
from specgraph_npu.host_ops import HOST_OPS, HostOp, make_call
from specgraph_npu.rows import store_heads, store_latent

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform

_MASK_SIZE = 2048
"""Sparse mode 3 (causal, aligned to the last key) takes one compressed mask of this size for all lengths."""


@dataclass(frozen=True, slots=True)
class HostOpAttention:
    """Attention through one row of the table. The lengths are host parameters, all else is read on the device."""

    platform: NpuPlatform
    row: HostOp
    host_parameters: tuple[str, ...] = ("query_lens", "seq_lens")
    constants: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def name(self) -> str:
        """See `AttentionBackend.name`."""
        return self.row.name

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Constants that captured ops read, by name: part of the read-set."""
        self._causal_mask()
        return {f"attention.{name}": tensor for name, tensor in self.constants.items()}

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
        """See `AttentionBackend.forward`.

        Raises:
            UpdateError: the step came without host lengths.
            UnsupportedError: the row can't do what the layer or the batch asks for.
        """
        metadata, lengths = context.metadata, context.lengths
        if lengths is None:
            raise UpdateError(f"attention '{self.name}' takes host lengths; step {context.step} came without")
        if self.row.rows_per_request == "one" and metadata.query_len > 1:
            raise UnsupportedError(
                f"attention '{self.name}' takes one row a request, step {context.step} has {metadata.query_len}: "
                "use 'fia'"
            )
        store = store_latent if self.row.is_latent else store_heads
        rows = store(layer, query, key, value, cache, metadata)
        flat = self.row.lse != ""  # the FIA ops take caches with heads and head_dim in one dimension
        options: dict[str, Any] = {"block_size": cache.block_size} if flat else {}
        tensors = {"block_table": metadata.block_table, **rows.rope}
        if layer.causal and metadata.query_len > 1:
            options["sparse_mode"] = 3
            tensors["atten_mask"] = self._causal_mask()
        call = make_call(
            self.row,
            rows.query,
            rows.key.flatten(2) if flat else rows.key,
            rows.value.flatten(2) if flat else rows.value,
            rows.out,
            None,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            scale=layer.scale,
            tensors=tensors,
            options=options,
        )
        workspace = call.workspace(lengths)
        if context.updates is None:
            call.issue(lengths, workspace)
            return rows.result()
        with self.platform.task_group() as group:
            call.issue(lengths, workspace)
        weak = call.weak(self.platform.weak_reference)
        rewrite: Callable[[HostLengths], None] = partial(_issue, weak, self.platform.weak_reference(workspace))
        context.updates.add(TaskKey(context.step, index), group, rewrite)
        return rows.result()

    def _causal_mask(self) -> Tensor:
        """bool [2048, 2048], True above the diagonal, made once and never written again."""
        if "causal_mask" not in self.constants:
            ones = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool)
            self.constants["causal_mask"] = ones.triu(1).to(self.platform.device)
        return self.constants["causal_mask"]


def _issue(call: Any, workspace: Tensor, lengths: HostLengths) -> None:
    call.issue(lengths, workspace)


def make_attention(platform: NpuPlatform, name: str) -> HostOpAttention:
    """Attention through the row of that name.

    Raises:
        ConfigError: there is no such row.
        UnsupportedError: what the row needs is not installed.
    """
    row = HOST_OPS.get(name)
    if row is None:
        raise ConfigError(f"no attention '{name}' on NPU; there are {', '.join(HOST_OPS)}")
    if not (support := row.available()):
        raise UnsupportedError(f"attention '{name}' is not available: {support.reason}")
    return HostOpAttention(platform, row)


def attention_factories() -> Mapping[str, Callable[..., HostOpAttention]]:
    """By name, for `Platform.attention_backends`: what is installed here and takes any layer's heads.

    MLA rows are left out: they are for heads that put latents into query and key (`store_latent`), and only those.
    """
    names = [name for name, row in HOST_OPS.items() if not row.is_latent and row.available()]
    return {name: partial(make_attention, name=name) for name in names}

"""The `attend` callable of a pass, for each pass mode: eager, captured whole, or captured between attention calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specgraph.attention import (
    Attend,
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    ForwardContext,
    HostLengths,
    KVCache,
    Store,
)
from specgraph.attention.interface import attend_with
from specgraph.attention.paged import store_rows
from specgraph.capture.graph_runner import Recording, StepLengths

PassMode = Literal["eager", "piecewise", "full"]
"""The mode of one kind of pass. eager: it runs op by op. piecewise: from graphs between eager attention calls. full:
from one graph."""

MakeAttend = Callable[[AttentionMetadata, int], Attend]
"""`make_attend(metadata, step)` returns the attend callable of one forward pass."""


@dataclass(frozen=True, slots=True)
class AttentionStack:
    """A model's attention layers with their backend and KV caches."""

    backend: AttentionBackend
    layers: Sequence[AttentionLayer]
    caches: Sequence[KVCache]

    def attend_in(self, recording: Recording | None, mode: PassMode, lengths: StepLengths | None = None) -> MakeAttend:
        """Return attention for one pass that runs at once or is captured.

        Args:
            recording: the ongoing capture. None if the pass runs at once.
            mode: with "piecewise" a capture ends the graph before each attention call, which stays eager, and goes on
                in a new graph.
            lengths: host lengths by step, for attention with host parameters that runs at once. In a step without
                lengths every request is inert.
        """

        def make_attend(metadata: AttentionMetadata, step: int) -> Attend:
            context = self._context(metadata, step, lengths or {})
            if recording is not None and mode == "piecewise":
                return self._split(recording, context)
            if recording is not None and self.backend.host_parameters:
                context = replace(context, updates=recording.updates)
            return attend_with(self.backend, self.layers, self.caches, context)

        return make_attend

    def store(self, metadata: AttentionMetadata) -> Store:
        """Return the function that writes rows to the caches without attention. It works in every mode."""

        def store(index: int, key: Tensor, value: Tensor) -> None:
            store_rows(self.layers[index], key, value, self.caches[index], metadata)

        return store

    def _split(self, recording: Recording, context: ForwardContext) -> Attend:
        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = torch.empty_like(query)  # in the graph's pool, at a fixed address, kept alive by `call`

            def call(lengths: StepLengths) -> None:
                now = replace(context, lengths=lengths.get(context.step, context.lengths))
                layer, cache = self.layers[index], self.caches[index]
                out.copy_(self.backend.forward(layer, index, query, key, value, cache, now))

            recording.split(call)
            return out

        return attend

    def _context(self, metadata: AttentionMetadata, step: int, lengths: StepLengths) -> ForwardContext:
        if not self.backend.host_parameters:
            return ForwardContext(metadata, step)
        requests = metadata.num_requests
        inert = HostLengths([metadata.query_len] * requests, [0] * requests)
        return ForwardContext(metadata, step, lengths.get(step, inert))

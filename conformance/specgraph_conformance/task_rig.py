"""Captured attention ops with host lengths, one per task group."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from specgraph.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    ForwardContext,
    HostLengths,
    KVCache,
    PagedHostAttention,
)
from specgraph.attention.metadata import allocate_metadata
from specgraph.capture import UpdatePlan
from specgraph.capture.update_plan import Task
from specgraph.device import Event, Graph, Platform
from torch import Tensor

from specgraph_conformance.rig import AttentionShape, on_host, supported_shape

REQUESTS, HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 3, 4, 2, 64, 16, 4


def host_attention(platform: Platform) -> AttentionBackend:
    """Return the device's own attention with host parameters. If it has none, return the core's."""
    for factory in platform.attention_backends().values():
        made: AttentionBackend = factory(platform)
        if made.host_parameters:
            return made
    return PagedHostAttention(platform)


@contextmanager
def replayed(platform: Platform, graph: Graph) -> Generator[None]:
    """Replay the graph before or after the block, which updates it. The platform's `update_order` decides."""
    during = platform.capabilities.update_order == "during_replay"
    if during:
        graph.replay()
    yield
    if not during:
        graph.replay()


def expect_waiting(done: Event, otherwise: str) -> None:
    """Check that the work before `done` waits at a gate. Otherwise fail with the text `otherwise`."""
    for _ in range(100):
        torch.zeros(1 << 12).exp()  # time for the device to pass the gate if it is open
    assert not done.query(), otherwise


@dataclass
class Tasks:
    """A graph of `steps` x `layers` attention ops with one row per request, each op in its own task group."""

    platform: Platform
    steps: int = 1
    layers: int = 1
    blocks: int = 0
    """The KV blocks that all requests share, for long contexts. 0 gives each request `BLOCKS` of its own."""
    plan: UpdatePlan = field(init=False)
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        platform, device = self.platform, self.platform.device
        generator = torch.Generator().manual_seed(11)
        self.attention = host_attention(platform)
        fits = supported_shape(self.attention, (HEADS, KV_HEADS), AttentionShape(dim=DIM, block=BLOCK))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, fits.dtype)

        self.layer = AttentionLayer(HEADS, KV_HEADS, fits.dim, fits.dim**-0.5)
        shape = (1 + (self.blocks or REQUESTS * BLOCKS), fits.block, KV_HEADS, fits.dim)
        self.caches = [KVCache(random(*shape), random(*shape)) for _ in range(self.layers)]
        blocks = torch.arange(1, shape[0], dtype=torch.int32)
        table = (blocks.repeat(REQUESTS, 1) if self.blocks else blocks.view(REQUESTS, BLOCKS)).to(device)
        self.metadata: AttentionMetadata = allocate_metadata(REQUESTS, [1], table)  # null slots: nothing is written
        self.query, self.key = random(REQUESTS, HEADS, fits.dim), random(REQUESTS, KV_HEADS, fits.dim)
        self.out = torch.zeros(self.steps, self.layers, REQUESTS, HEADS, fits.dim, dtype=fits.dtype, device=device)
        self.plan = UpdatePlan(platform, REQUESTS)
        inert = HostLengths([1] * REQUESTS, [0] * REQUESTS)
        self._run(dict.fromkeys(range(self.steps), inert), None)
        platform.synchronize()
        self.graph = platform.graph()
        with self.graph.capture():
            self._run(dict.fromkeys(range(self.steps), inert), self.plan)
        platform.synchronize()

    def _run(self, lengths: dict[int, HostLengths], updates: UpdatePlan | None) -> None:
        for step in range(self.steps):
            for index, cache in enumerate(self.caches):
                context = ForwardContext(self.metadata, step, lengths[step], updates)
                rows = self.attention.forward(self.layer, index, self.query, self.key, self.key, cache, context)
                self.out[step, index].copy_(rows)

    def lengths(self, *seq_lens: Sequence[int]) -> dict[int, HostLengths]:
        """Return the `HostLengths` of each draft step, from one list of key counts per step."""
        return {step: HostLengths([1] * REQUESTS, list(values)) for step, values in enumerate(seq_lens)}

    def replay(self, lengths: dict[int, HostLengths]) -> None:
        """Update and replay in the platform's order."""
        with replayed(self.platform, self.graph):
            self.plan.apply(lengths)

    @property
    def tasks(self) -> list[Task]:
        """The captured ops in capture order."""
        return [task for step in self.plan.tasks.values() for task in step]

    def update_steps(self, lengths: Mapping[int, HostLengths], during: Callable[[], None] = lambda: None) -> None:
        """Update only the groups of these draft steps. `UpdatePlan.apply` would refuse to leave groups out.

        Args:
            during: called inside each update, before the ops are issued again.
        """
        for task in self.tasks:
            if task.key.step in lengths:
                with self.platform.task_update(task.group):
                    during()
                    task.prepare(lengths[task.key.step])()

    def eager(self, lengths: dict[int, HostLengths]) -> Tensor:
        """Return the result without a graph."""
        self._run(lengths, None)
        self.platform.synchronize()
        return on_host(self.out)

    def result(self) -> Tensor:
        """Return the result of the last replay."""
        self.platform.synchronize()
        return on_host(self.out)

"""Broken lifetimes: launches that run later than they are issued, and memory of live graphs that eager tensors get."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor

from specgraph.cpu.checks.timeline import Timeline
from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.platform import CpuPlatform
from specgraph.cpu.pool import CpuGraphPool
from specgraph.cpu.stream import CpuEvent, CpuStream
from specgraph.cpu.tasks import UpdateMode

WAITS = {
    "event.wait": (CpuEvent, "wait"),
    "event.synchronize": (CpuEvent, "synchronize"),
    "stream.synchronize": (CpuStream, "synchronize"),
    "platform.synchronize": (CpuPlatform, "synchronize"),
    "close": (CpuGraph, "_destroy"),
}
"""The verbs that wait for launches on a device that runs them later."""


class LaterLaunches:
    """Replays of the cpu platform run at the next launch, or when somebody waits by what WAITS names. What is left
    out is the mistake; without one, the cases pass."""

    def __init__(self, patch: pytest.MonkeyPatch, without: tuple[str, ...] = ()) -> None:
        self.waiting: list[tuple[CpuGraph, CpuStream]] = []
        self.real, self.order = CpuGraph._launch, Timeline.replay
        patch.setattr(Timeline, "replay", lambda *_: None)  # the order is that of the launches, noted there
        patch.setattr(CpuGraph, "_launch", lambda graph: self.launch(graph))
        for name, (owner, verb) in WAITS.items():
            if name not in without:
                patch.setattr(owner, verb, self.first_runs(getattr(owner, verb)))

    def launch(self, graph: CpuGraph) -> None:
        self.run()
        stream, captured = graph.platform.current_stream(), graph._captured
        assert captured is not None
        for number, part in enumerate(captured.parts):
            self.order(graph.platform.timeline, graph, number, part.accesses, stream)
        self.waiting.append((graph, stream))

    def run(self, stream: CpuStream | None = None) -> None:
        """Run the launches of one stream, or all."""
        now = [each for each in self.waiting if stream is None or each[1] is stream]
        self.waiting = [each for each in self.waiting if each not in now]
        for graph, issued_to in now:
            with graph.platform.use(issued_to):
                if graph._captured is not None:
                    self.real(graph)

    def first_runs(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def verb(*args: Any, **options: Any) -> Any:
            self.run()
            return real(*args, **options)

        return verb


@mutant("wait-returns-early")
def event_orders_eager_work_only(patch: pytest.MonkeyPatch) -> None:
    """A stream that waits for an event does not wait for the replay before it."""
    LaterLaunches(patch, without=("event.wait",))


@mutant("wait-returns-early-host")
def event_synchronize_returns_at_once(patch: pytest.MonkeyPatch) -> None:
    """event.synchronize() returns while the replay before the event still runs."""
    LaterLaunches(patch, without=("event.synchronize",))


@mutant("wait-returns-early-stream")
def stream_synchronize_returns_at_once(patch: pytest.MonkeyPatch) -> None:
    """stream.synchronize() returns while the replays of the stream still run."""
    LaterLaunches(patch, without=("stream.synchronize",))


@mutant("wait-returns-early-current")
def synchronize_waits_for_the_current_stream(patch: pytest.MonkeyPatch) -> None:
    """platform.synchronize() waits for the current stream only."""
    later, real = LaterLaunches(patch, without=("platform.synchronize",)), CpuPlatform.synchronize

    def synchronize(self: CpuPlatform) -> None:
        later.run(self.current_stream())
        real(self)

    patch.setattr(CpuPlatform, "synchronize", synchronize)


@mutant("closed-under-a-replay")
def close_drops_what_was_launched(patch: pytest.MonkeyPatch) -> None:
    """close() frees a graph whose replay has not run yet."""
    LaterLaunches(patch, without=("close",))


class FreedBlocks:
    """torch.full_like gives memory of graph pools that was freed, as an allocator that serves both would."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[Any, int, int]] = []
        """(segment, offset, bytes)"""
        self.real = torch.full_like
        patch.setattr(torch, "full_like", self.full_like)

    def full_like(self, tensor: Tensor, value: float, **options: Any) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        for number, (segment, offset, size) in enumerate(self.blocks):
            if size >= nbytes:
                del self.blocks[number]
                memory = torch.frombuffer(segment.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                return memory.view(tensor.shape).fill_(value)
        return self.real(tensor, value, **options)


@mutant("scratch-given-away")
def scratch_of_a_capture_is_free_memory(patch: pytest.MonkeyPatch) -> None:
    """Memory that a capture allocated and dropped goes to the next eager tensor."""
    freed, real = FreedBlocks(patch), CpuGraphPool._free_block

    def free_block(self: Any, segment: Any, offset: int, size: int, *rest: Any) -> None:
        real(self, segment, offset, size, *rest)
        freed.blocks.append((segment, offset, size))

    patch.setattr(CpuGraphPool, "_free_block", free_block)


@mutant("close-frees-other-graphs")
def close_empties_all_pools(patch: pytest.MonkeyPatch) -> None:
    """close() of a graph gives the memory of every graph's pool to eager tensors."""
    freed, real = FreedBlocks(patch), CpuGraph._destroy
    pools: weakref.WeakSet[CpuGraphPool] = weakref.WeakSet()
    begin = CpuGraphPool.begin_capture

    def begin_capture(self: CpuGraphPool) -> int:
        pools.add(self)
        return begin(self)

    def destroy(self: CpuGraph) -> None:
        real(self)
        for pool in pools:
            freed.blocks += [(segment, 0, segment.nbytes) for segment in pool._segments]

    patch.setattr(CpuGraphPool, "begin_capture", begin_capture)
    patch.setattr(CpuGraph, "_destroy", destroy)


@mutant("dropped-graph-in-an-update")
def release_ends_the_update(patch: pytest.MonkeyPatch) -> None:
    """A graph that is released while an update is open invalidates it: the replay keeps the values before."""
    released, began, real = [0], dict[int, int](), (UpdateMode.__init__, UpdateMode.commit, CpuGraphPool.leave)

    def init(self: UpdateMode, group: Any) -> None:
        real[0](self, group)
        began[id(self)] = released[0]

    def commit(self: UpdateMode) -> None:
        if began.pop(id(self)) == released[0]:
            real[1](self)

    def leave(self: CpuGraphPool, handle: Any) -> None:
        released[0] += 1
        real[2](self, handle)

    patch.setattr(UpdateMode, "__init__", init)
    patch.setattr(UpdateMode, "commit", commit)
    patch.setattr(CpuGraphPool, "leave", leave)

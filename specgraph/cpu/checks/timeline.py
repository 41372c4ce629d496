"""Order between replays and tracked eager work on the streams of one platform."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from specgraph.cpu.checks.order import Access, Clock, EagerLog, Region, conflict, merge, order_error
from specgraph.cpu.ops import EMPTY, changes_metadata_only, written_by
from specgraph.cpu.tasks import BlockMode
from specgraph.dispatch_mode import tensors_in
from specgraph.user_code import user_line

if TYPE_CHECKING:
    from specgraph.cpu.graph import CpuGraph
    from specgraph.cpu.platform import CpuPlatform
    from specgraph.cpu.stream import CpuStream

_PartKey = tuple[int, int]


class Timeline:
    """Records the last tick of every graph part on every stream, and the memory that tracked eager work touched.

    A replay costs two dictionary entries if its stream is ordered after all work of the other streams. A lock
    serialises threads that use streams of their own.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self._turn = threading.RLock()  # garbage collection may call `forget` in the thread that holds the lock
        self._eager = EagerLog()
        self._streams: dict[int, CpuStream] = {}
        self._all_ticks = 0
        self._settled: dict[int, int] = {}
        self._ticks: dict[tuple[_PartKey, int], int] = {}
        self._accesses: dict[_PartKey, list[Access]] = {}
        self._conflicts: dict[tuple[_PartKey, _PartKey], tuple[Access, Access] | None] = {}

    def replay(self, graph: CpuGraph, part: int, accesses: list[Access], stream: CpuStream) -> None:
        """Begin one part of a graph on `stream`. Raises OrderError if unordered work of another stream conflicts."""
        with self._turn:
            self._tick(stream)
            key = graph.number, part
            self._check(key, accesses, stream)
            self._accesses[key] = accesses
            self._ticks[key, stream.id] = stream.clock[stream.id]

    def eager(self, label: str, tensors: list[torch.Tensor], written: set[int], stream: CpuStream) -> None:
        """Note that one eager op is about to run on `stream`. Raises OrderError as `replay` does."""
        accesses = [Access(Region.of(t), id(t) in written, label) for t in tensors if t.device.type == "cpu"]
        with self._turn:
            self._tick(stream)
            self._check(None, accesses, stream)
            for tensor, access in zip(tensors, accesses, strict=False):
                self._eager.add(tensor, stream.id, stream.clock[stream.id], access)

    def everything(self) -> Clock:
        """Return the clock of all work so far."""
        clock: Clock = {}
        with self._turn:
            for stream in self._streams.values():
                merge(clock, stream.clock)
        return clock

    def forget(self, graph: CpuGraph) -> None:
        """Drop the entries of a graph, after its capture was dropped."""
        with self._turn:
            self._accesses = {k: v for k, v in self._accesses.items() if k[0] != graph.number}
            self._ticks = {k: v for k, v in self._ticks.items() if k[0][0] != graph.number}
            self._conflicts = {k: v for k, v in self._conflicts.items() if graph.number not in (k[0][0], k[1][0])}

    def _tick(self, stream: CpuStream) -> None:
        if self.host:
            merge(stream.clock, self.host)
        stream.clock[stream.id] += 1
        self._all_ticks += 1
        self._streams[stream.id] = stream

    def _may_be_unordered(self, stream: CpuStream) -> bool:
        """Return whether `stream` is not ordered after some work of another stream. Cheap while the others are idle."""
        elsewhere = self._all_ticks - stream.clock[stream.id]
        if self._settled.get(stream.id) == elsewhere:
            return False
        for other in self._streams.values():
            if stream.clock.get(other.id, 0) < other.clock[other.id]:
                return True
        self._settled[stream.id] = elsewhere
        return False

    def _check(self, key: _PartKey | None, accesses: list[Access], stream: CpuStream) -> None:
        """Raise OrderError if work of another stream conflicts, and nothing orders the two.

        `key` is the part of a graph that makes the accesses, or None. Conflicts between two parts are computed once.
        """
        if not self._may_be_unordered(stream):
            return
        for (other_key, other), tick in self._ticks.items():
            if other == stream.id or stream.clock.get(other, 0) >= tick:
                continue
            if key is None:
                found = conflict(accesses, self._accesses.get(other_key, []))
            else:
                pair = key, other_key
                if pair not in self._conflicts:
                    self._conflicts[pair] = conflict(accesses, self._accesses.get(other_key, []))
                found = self._conflicts[pair]
            if found is not None:
                raise order_error(found[0], str(stream), found[1], str(self._streams[other]))
        for access in accesses:
            if (earlier := self._eager.unordered(access, stream.id, stream.clock)) is not None:
                raise order_error(access, str(stream), earlier[1], str(self._streams[earlier[0]]))


class TrackedWork(BlockMode):
    """Reports this thread's eager ops to the timeline before they run, except during a capture."""

    def __init__(self, platform: CpuPlatform) -> None:
        super().__init__()
        self._platform = platform

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            return func(*args, **kwargs)
        if self._platform.recorder is None and not changes_metadata_only(func) and func.overloadpacket not in EMPTY:
            stream = self._platform.current_stream()
            given = tensors_in(args, list(kwargs.values()))
            label = f"{func} at {user_line()}"
            self._platform.timeline.eager(label, given, written_by(func, args, kwargs), stream)
            result = func(*args, **kwargs)
            if fresh := [t for t in tensors_in(result) if not any(t is g for g in given)]:
                self._platform.timeline.eager(label, fresh, {id(t) for t in fresh}, stream)
            return result
        return func(*args, **kwargs)

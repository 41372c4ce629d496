"""Vector clocks, the memory regions that work accesses, and the streams that take part in a capture.

Each piece of work on a stream advances the stream's clock by one. A wait merges the clock of the awaited work into the
clock of the waiting stream. The clocks must order any two accesses to the same bytes if one of them is a write:
otherwise their order on a device depends on timing.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgraph.errors import CaptureError, OrderError

if TYPE_CHECKING:
    from specgraph.cpu.stream import CpuStream

Clock = dict[int, int]
"""The work that is known to come before: stream id -> the last tick of that stream."""

EXACT_LIMIT = 1 << 20
"""Interleaved regions with more elements are compared by their byte intervals only."""


def merge(into: Clock, other: Clock) -> None:
    """Order `into` after all work that `other` is ordered after. Another thread may extend `other` meanwhile."""
    for stream, tick in other.copy().items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


class Region(NamedTuple):
    """The bytes that one tensor covers."""

    base: int
    start: int
    stop: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Region:
        size, stride, itemsize = tuple(tensor.size()), tensor.stride(), tensor.element_size()
        start = tensor.data_ptr()
        extent = tensor.numel()
        if extent and not tensor.is_contiguous():
            extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return Region(tensor.untyped_storage().data_ptr(), start, start + extent * itemsize, size, stride, itemsize)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def is_dense(self) -> bool:
        return self.numel * self.itemsize == self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Return whether a byte is in both regions. If both are interleaved with the same item size, their elements are
        compared."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if self == other or (self.is_dense and other.is_dense):
            return True
        if self.itemsize != other.itemsize or max(self.numel, other.numel) > EXACT_LIMIT:
            return True
        return not self._addresses().isdisjoint(other._addresses())

    def _addresses(self) -> set[int]:
        addresses = [self.start]
        for n, s in zip(self.size, self.stride, strict=True):
            addresses = [a + i * s * self.itemsize for a in addresses for i in range(n if s else 1)]
        return set(addresses)


class Access(NamedTuple):
    """One region that a piece of work reads or writes. `label` names the work in messages."""

    region: Region
    write: bool
    label: str


def conflict(ours: list[Access], theirs: list[Access]) -> tuple[Access, Access] | None:
    """Return the first pair of accesses to a common byte with at least one write. None if there is none."""
    for a in ours:
        for b in theirs:
            if (a.write or b.write) and a.region.overlaps(b.region):
                return a, b
    return None


def order_error(ours: Access, our_stream: str, theirs: Access, their_stream: str) -> OrderError:
    def verb(access: Access) -> str:
        return "writes" if access.write else "reads"

    shape = list(ours.region.size)
    return OrderError(
        f"{ours.label} on {our_stream} {verb(ours)} memory (shape {shape}) that {theirs.label} on {their_stream} "
        f"{verb(theirs)}, and nothing orders the two: record an event after one and wait for it before the other, "
        f"or use wait_stream"
    )


class EagerLog:
    """The tracked eager work: per storage, the last tick of each (stream, region, read or write).

    The last tick is enough: work ordered after it is ordered after all earlier ticks. The entries of a storage are
    dropped with the storage, so the regions that exist bound the log.
    """

    def __init__(self) -> None:
        self._entries: dict[int, dict[tuple[int, Region, bool], tuple[int, str]]] = {}

    def add(self, tensor: torch.Tensor, stream: int, tick: int, access: Access) -> None:
        storage = tensor.untyped_storage()
        entries = self._entries.get(access.region.base)
        if entries is None:
            entries = self._entries[access.region.base] = {}
            weakref.finalize(storage, self._entries.pop, access.region.base, None).atexit = False
        entries[stream, access.region, access.write] = tick, access.label

    def unordered(self, access: Access, stream: int, clock: Clock) -> tuple[int, Access] | None:
        """Return a conflicting access of another stream that `clock` does not order before this one, or None."""
        for (other, region, write), (tick, label) in self._entries.get(access.region.base, {}).items():
            if other == stream or not (write or access.write) or clock.get(other, 0) >= tick:
                continue
            if access.region.overlaps(region):
                return other, Access(region, write, label)
        return None


class CaptureOrder:
    """Checks the order of accesses by the streams of one capture.

    These are the capturing stream, and every stream that has waited for a point of the capture.
    """

    def __init__(self, origin: CpuStream) -> None:
        self._origin = origin
        self._streams = {origin.id: origin}
        self._clocks: dict[int, Clock] = {origin.id: {origin.id: 0}}
        self._log: dict[int, list[tuple[int, list[Access]]]] = {}

    def clock_of(self, stream: CpuStream) -> Clock | None:
        """Return the capture's clock of `stream`, or None if the stream takes no part in it."""
        return self._clocks.get(stream.id)

    def join(self, stream: CpuStream, clock: Clock) -> None:
        """Let `stream` take part in the capture: it waits for the point of the capture at `clock`."""
        self._streams[stream.id] = stream
        merge(self._clocks.setdefault(stream.id, {stream.id: 0}), clock)

    def add(self, stream: CpuStream, accesses: list[Access]) -> None:
        """Advance the stream's clock by one op.

        Raises:
            CaptureError: the stream takes no part in the capture.
            OrderError: the op conflicts with work of another stream of the capture, and nothing orders that before it.
        """
        clock = self._clocks.get(stream.id)
        if clock is None:
            raise CaptureError(
                f"{accesses[0].label if accesses else 'an op'} runs on {stream}, which takes no part in the "
                f"capture: let it wait for the capturing stream first ({stream}.wait_stream)"
            )
        clock[stream.id] += 1
        for other, log in self._log.items():
            if other == stream.id:
                continue
            for tick, theirs in reversed(log):
                if tick <= clock.get(other, 0):
                    break
                if (found := conflict(accesses, theirs)) is not None:
                    raise order_error(found[0], str(stream), found[1], str(self._streams[other]))
        self._log.setdefault(stream.id, []).append((clock[stream.id], accesses))

    def check_joined(self) -> None:
        """Raise CaptureError if the capturing stream did not wait for all work of another one by the capture's end."""
        known = self._clocks[self._origin.id]
        for stream_id, clock in self._clocks.items():
            if known.get(stream_id, 0) < clock[stream_id]:
                raise CaptureError(
                    f"{self._streams[stream_id]} was forked off the capture and never joined: let {self._origin} wait "
                    f"for it (wait_stream) before the capture ends"
                )

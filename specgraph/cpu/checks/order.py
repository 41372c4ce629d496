"""Vector clocks, and the memory regions whose accesses they order.

Each piece of work on a stream advances the stream's clock by one; a wait merges the clock of what is waited for. Two
accesses to the same bytes, at least one of them a write, must be ordered by these clocks; otherwise their order on a
device depends on timing.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch

from specgraph.errors import OrderError

Clock = dict[int, int]
"""Stream id -> the last tick of that stream known to have finished before."""

EXACT_LIMIT = 1 << 20
"""Above this many elements, interleaved regions are compared by their byte intervals only."""


def merge(into: Clock, other: Clock) -> None:
    """Order `into` after everything that `other` is ordered after. Other threads may be extending `other`."""
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
        """Return whether any byte is in both. Interleaved regions of one item size are compared element by element."""
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
    """One region touched by one piece of work; `label` names the work in messages."""

    region: Region
    write: bool
    label: str


def conflict(ours: list[Access], theirs: list[Access]) -> tuple[Access, Access] | None:
    """Return the first pair that touches the same bytes with at least one write."""
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
    """Tracked eager work: per storage, the last tick of each (stream, region, read or write).

    The last tick is enough: work ordered after it is ordered after all earlier ones. Entries are dropped with their
    storage, so the log is bounded by the regions that exist.
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
        """Return an earlier conflicting access of another stream that `clock` doesn't know to be over."""
        for (other, region, write), (tick, label) in self._entries.get(access.region.base, {}).items():
            if other == stream or not (write or access.write) or clock.get(other, 0) >= tick:
                continue
            if access.region.overlaps(region):
                return other, Access(region, write, label)
        return None

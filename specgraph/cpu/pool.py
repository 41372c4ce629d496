"""The private memory of captured graphs: blocks at fixed addresses, poisoned when allocated and when freed.

It follows the rules of a device's caching allocator in a capture. A capture reuses the block of a tensor that is freed
during it. A tensor that outlives the capture keeps its block. A later graph of the same pool may reuse memory that an
earlier graph still writes at every replay. Free blocks are kept per stream.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import itertools
import mmap
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from specgraph.device.pool import GraphPool

if TYPE_CHECKING:
    from specgraph.cpu.platform import CpuPlatform

ALIGNMENT = 64
SEGMENT = 1 << 20

_capture_ids = itertools.count(1)


def poison(address: int, nbytes: int, dtype: torch.dtype) -> None:
    """Fill memory with NaN (floats), True (bool) or values far out of range (integers).

    It uses ctypes, not torch, because a finalizer may run while any dispatch mode is active.
    """
    integer = 0x01 if dtype == torch.bool else 0x7F
    byte = 0xFF if dtype.is_floating_point or dtype.is_complex else integer
    ctypes.memset(address, byte, nbytes)


class MemoryCount:
    """The bytes of all pools of one platform: `reserved` from the system, `allocated` to living tensors."""

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        self.segments: dict[int, object] = {}
        """The segment of each living block, by the block's address. It keeps the block's memory mapped."""

    def add_reserved(self, nbytes: int) -> None:
        self.reserved += nbytes


class _Segment:
    """Anonymous memory of the process. It is unmapped when the pool and the last block have released it."""

    def __init__(self, nbytes: int, count: MemoryCount) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise torch.OutOfMemoryError(f"out of memory: the system has no {nbytes} bytes for a graph pool") from error
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.live_blocks = 0
        count.add_reserved(nbytes)
        weakref.finalize(self, count.add_reserved, -nbytes).atexit = False


class CpuGraphPool(GraphPool):
    """The memory that captured graphs allocate from. Made by `CpuPlatform.graph_pool()`.

    It goes back to the system when every graph in the pool is closed or reset and no tensor lives in it.
    """

    def __init__(self, platform: CpuPlatform) -> None:
        super().__init__(platform)
        self._count = platform.memory_count
        self._segments: list[_Segment] = []
        self._free: dict[int, list[tuple[_Segment, int, int]]] = {}  # stream -> (segment, offset, bytes), by address
        self._freed: deque[tuple[_Segment, int, int, int]] = deque()  # finalizers only append; allocate() merges
        self._owner: dict[int, int] = {}  # address of a living block -> the capture that allocated it
        self._capture_id = 0

    def begin_capture(self) -> int:
        """Start a new capture, which owns the blocks allocated from now on. Return its id."""
        self._capture_id = next(_capture_ids)
        return self._capture_id

    def _release(self, handle: Any) -> None:
        self._trim()

    def allocated_by(self, address: int) -> int | None:
        """Return the id of the capture that allocated the living block at `address`, or None."""
        return self._owner.get(address)

    def covers(self, address: int) -> bool:
        """Return whether `address` lies in this pool's memory."""
        return any(s.address <= address < s.address + s.nbytes for s in self._segments)

    def allocate(self, nbytes: int, dtype: torch.dtype, stream: int) -> torch.UntypedStorage:
        """Return a poisoned storage of at least `nbytes` bytes, from the free blocks of `stream`."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self._merge_freed()
        segment, offset = self._take(size, stream)
        address = segment.address + offset
        poison(address, size, dtype)
        buffer = (ctypes.c_char * max(nbytes, dtype.itemsize)).from_buffer(segment.memory, offset)
        segment.live_blocks += 1
        self._count.allocated += size
        self._count.segments[address] = segment
        self._owner[address] = self._capture_id
        weakref.finalize(buffer, self._free_block, segment, offset, size, stream, dtype).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def _take(self, size: int, stream: int) -> tuple[_Segment, int]:
        free = self._free.setdefault(stream, [])
        best = min((i for i, (_, _, have) in enumerate(free) if have >= size), key=lambda i: free[i][2], default=None)
        if best is None:
            segment = _Segment(-(-size // SEGMENT) * SEGMENT, self._count)
            self._segments.append(segment)
            free.append((segment, 0, segment.nbytes))
            best = len(free) - 1
        segment, offset, have = free[best]
        free[best : best + 1] = [(segment, offset + size, have - size)] if have > size else []
        return segment, offset

    def _free_block(self, segment: _Segment, offset: int, size: int, stream: int, dtype: torch.dtype) -> None:
        address = segment.address + offset
        poison(address, size, dtype)
        self._owner.pop(address, None)
        self._count.segments.pop(address, None)
        segment.live_blocks -= 1
        self._count.allocated -= size
        self._freed.append((segment, offset, size, stream))
        self._trim()

    def _merge_freed(self) -> None:
        touched: set[int] = set()
        while self._freed:
            segment, offset, size, stream = self._freed.popleft()
            self._free.setdefault(stream, []).append((segment, offset, size))
            touched.add(stream)
        for stream in touched:
            merged: list[tuple[_Segment, int, int]] = []
            for segment, offset, size in sorted(self._free[stream], key=lambda b: b[0].address + b[1]):
                if merged and merged[-1][0] is segment and merged[-1][1] + merged[-1][2] == offset:
                    merged[-1] = (segment, merged[-1][1], merged[-1][2] + size)
                else:
                    merged.append((segment, offset, size))
            self._free[stream] = merged

    def _trim(self) -> None:
        if self.num_graphs:
            return
        self._merge_freed()
        self._segments = [s for s in self._segments if s.live_blocks]
        kept = set(map(id, self._segments))
        self._free = {k: [b for b in v if id(b[0]) in kept] for k, v in self._free.items()}

"""The linears of up to 32 rows that `few_rows.cu` takes, and the parts that each is cut into."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. On a device with fewer, some blocks run after the others."""

_MOST_BYTES = 227 << 10
"""Bytes of shared memory that a launch may ask for on Hopper."""

_LEAST_DEPTH, _LEAST_BLOCKS = 2048, 96
"""The fewest input columns, and blocks, of the linears that were timed. All of these were faster than in Triton's
kernel; see benchmarks/LESSONS.md."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a linear; `few_rows.cu` explains each number."""

    rows: int
    columns: int
    stage_tiles: int
    best: int
    window: int = 64 << 10

    @property
    def threads(self) -> int:
        """The threads of a block: eight warps that multiply, or four for up to 16 rows, and two that load."""
        return 320 if self.rows > 16 else 192

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of one stage of the ring."""
        return 128 * self.stage_tiles * (self.columns + self.rows)

    @property
    def stages(self) -> int:
        """The stages that fit in shared memory. Each has three barriers of 8 bytes."""
        return (_MOST_BYTES - 1024 - self._sums) // (self.stage_bytes + 24)

    @property
    def memory(self) -> int:
        """Return the bytes of shared memory that a launch asks for. 1 KiB of them is for aligning the ring."""
        return 1024 + self.stages * (self.stage_bytes + 24) + self._sums

    @property
    def _sums(self) -> int:
        """Return the bytes of the sums of one part."""
        return 16 * self.rows * (self.columns + 4)

    def parts(self, columns: int) -> int:
        """Return the number of parts that the output columns are cut into."""
        return -(-columns // self.columns)

    def blocks(self, columns: int) -> int:
        """Return the blocks of a launch. They all run at once, and their numbers of parts differ by at most one."""
        parts = self.parts(columns)
        return -(-parts // -(-parts // MULTIPROCESSORS))


def plan_for(best: bool, rows: int, depth: int, columns: int) -> Plan | None:
    """Return the plan of a linear. None if another kernel is as fast, or if no linear this small was timed.

    Args:
        best: only the largest output of each row is wanted.
        depth: input columns.
        columns: output columns.
    """
    if not 0 < rows <= 32:
        return None
    plan = cut(best, rows, columns)
    blocks = plan.blocks(columns)
    if rows > 16 and blocks < plan.parts(columns):  # each part reads x again, which takes as long as its weights
        return None
    return plan if depth >= _LEAST_DEPTH and blocks >= _LEAST_BLOCKS else None


def cut(best: bool, rows: int, columns: int) -> Plan:
    """Return the plan of a linear of up to 32 rows and any columns: parts of at most 128 columns, stages of 8 to
    24 KiB."""
    parts_each = -(-columns // (128 * MULTIPROCESSORS))
    width = -(-columns // (16 * parts_each * MULTIPROCESSORS)) * 16
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    tiles = 4 if width + padded <= 48 else 2 if width <= 64 else 1
    return Plan(padded, width, tiles, int(best))

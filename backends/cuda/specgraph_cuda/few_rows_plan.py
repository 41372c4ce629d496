"""The linears of up to 32 rows that `few_rows.cu` takes, and how they are cut into parts."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200; with fewer, some blocks run after the others."""

_MOST_BYTES = 227 << 10
"""Bytes of shared memory that a launch may ask for on Hopper."""

_LEAST_DEPTH, _LEAST_BLOCKS = 2048, 96
"""The linears that were timed: each was faster than Triton's kernel, see benchmarks/LESSONS.md."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a linear; `few_rows.cu` says what each number means."""

    rows: int
    columns: int
    stage_tiles: int
    best: int
    window: int = 64 << 10

    @property
    def threads(self) -> int:
        """Threads of a block: warps that multiply, and two that load."""
        return 320 if self.rows > 16 else 192

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of one stage of the ring."""
        return 128 * self.stage_tiles * (self.columns + self.rows)

    @property
    def stages(self) -> int:
        """Stages, as many as there is memory for; each has three barriers."""
        return (_MOST_BYTES - 1024 - self._sums) // (self.stage_bytes + 24)

    @property
    def memory(self) -> int:
        """Return the bytes of shared memory that a launch asks for, 1 KiB of it to align the ring."""
        return 1024 + self.stages * (self.stage_bytes + 24) + self._sums

    @property
    def _sums(self) -> int:
        """Return the bytes of the sums of one part."""
        return 16 * self.rows * (self.columns + 4)

    def parts(self, columns: int) -> int:
        """Parts that so many output columns are cut into."""
        return -(-columns // self.columns)

    def blocks(self, columns: int) -> int:
        """Blocks of a launch: no more than run at once, each with as many parts as the others or one less."""
        parts = self.parts(columns)
        return -(-parts // -(-parts // MULTIPROCESSORS))


def plan_for(best: bool, rows: int, depth: int, columns: int) -> Plan | None:
    """Return how a linear is cut; None where another kernel is as fast, or where it is smaller than those that were
    timed.

    Args:
        best: only the largest of each row is wanted.
        depth: input columns; columns: of the output.
    """
    if not 0 < rows <= 32:
        return None
    plan = cut(best, rows, columns)
    blocks = plan.blocks(columns)
    if rows > 16 and blocks < plan.parts(columns):  # each part reads x again, which takes as long as its weights
        return None
    return plan if depth >= _LEAST_DEPTH and blocks >= _LEAST_BLOCKS else None


def cut(best: bool, rows: int, columns: int) -> Plan:
    """Return the plan of any size up to 32 rows: parts of at most 128 columns, and stages of 8 to 24 KiB."""
    parts_each = -(-columns // (128 * MULTIPROCESSORS))
    width = -(-columns // (16 * parts_each * MULTIPROCESSORS)) * 16
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    tiles = 4 if width + padded <= 48 else 2 if width <= 64 else 1
    return Plan(padded, width, tiles, int(best))

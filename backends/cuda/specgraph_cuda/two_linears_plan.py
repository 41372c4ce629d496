"""The pairs of linears that `two_linears.cu` takes, and the blocks that each pair is cut into."""

from __future__ import annotations

from dataclasses import dataclass

from specgraph_cuda.many_rows_plan import BLOCKS

_MOST_BYTES = (227 << 10) - 16
"""Bytes of shared memory that a launch may ask for on Hopper: a block's limit, minus the bytes that the kernel
declares."""

ROWS = 8, 16, 32
"""Rows that the kernel is compiled for."""

_GATED = {(4096, 4096, 14336): 32, (4096, 4096, 12288): 16, (2048, 2048, 8192): 8}
_PLAIN = {(14336, 4096, 6144): 8, (12288, 4096, 6144): 8}
"""(input columns, output columns of the first linear, of the second) -> the most rows that one kernel was faster
for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of two linears; `two_linears.cu` explains each number."""

    rows: int
    first: int
    second: int
    halves: int
    first_tiles: int = 2
    second_tiles: int = 1
    window: int = 64 << 10
    ahead: int = 3
    late: int = 0

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of one stage of the ring."""
        first, second = self.first_tiles * (self.first + self.rows), self.second_tiles * (self.second + self.rows)
        return 128 * max(first, second)

    @property
    def stages(self) -> int:
        """The stages that fit in shared memory. Each has three barriers of 8 bytes."""
        return (_MOST_BYTES - 1024 - self._beside) // (self.stage_bytes + 24)

    @property
    def memory(self) -> int:
        """Return the bytes of shared memory that a launch asks for. 1 KiB of them is for aligning the ring."""
        return 1024 + self.stages * (self.stage_bytes + 24) + self._beside

    @property
    def _beside(self) -> int:
        """Return the bytes of the first linear's sums and of the norm's factor per row."""
        return self.rows * (16 * (self.first + 4) + 4)

    @property
    def threads(self) -> int:
        """The threads of a block: four multiplying warps for each 16 rows, and three more warps."""
        return 32 * (4 * -(-self.rows // 16) + 3)

    def blocks(self, size: int, columns: int) -> int:
        """Return the blocks of a launch, for `size` output columns of the first linear and `columns` of the second."""
        return max(-(-size // self.first), -(-columns // self.second))


def plan_for(gated: bool, rows: int, depth: int, size: int, columns: int) -> Plan | None:
    """Return the plan of a pair of linears. None if two kernels are as fast, or if the pair was not measured.

    Args:
        depth: input columns of the first linear.
        size: output columns of the first linear, which are the input columns of the second.
        columns: output columns of the second linear. If it is gated, its weight has two rows for each.
    """
    most = (_GATED if gated else _PLAIN).get((depth, size, columns), 0)
    return cut(gated, rows, size, columns) if 0 < rows <= most else None


def cut(gated: bool, rows: int, size: int, columns: int) -> Plan:
    """Return the plan of a pair of any columns, up to 32 rows: one block per multiprocessor, stages of 8 to 16 KiB."""
    first, second = (-(-length // (16 * BLOCKS)) * 16 for length in (size, columns))
    return Plan(
        next(padded for padded in ROWS if rows <= padded), first, second, 1 + gated, 2, 2 if second <= 64 else 1
    )

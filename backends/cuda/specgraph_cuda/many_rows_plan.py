"""How linears of 65 to 384 rows are cut into the blocks of `many_rows.cu`."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 227 << 10
"""Bytes of shared memory that a block may have."""


BLOCKS = 128
"""Blocks that the plans below want to run at once, one per multiprocessor."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one linear is cut into blocks; `many_rows.cu` says what each number means."""

    groups: int
    columns: int
    stages: int
    split: int = 1

    @property
    def rows(self) -> int:
        """Rows of x per block."""
        return 64 * self.groups

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + 1024


def plan_for(rows: int, columns: int, depth: int, gated: bool) -> Plan | None:
    """How a linear is cut; None where a library matmul is as fast, or where nobody has measured.

    Args:
        columns: of the output; a gated linear has twice as many rows of weights.
        depth: input columns.
    """
    if not 64 < rows <= 384:
        return None
    blocks = 1 if rows <= 192 else 2
    groups = 2 if rows <= 128 * blocks else 3
    # Each plan has BLOCKS blocks, or twice as many. In clusters of four and more these do not run at once on an H200:
    # they take twice the time.
    if gated and (columns, depth) == (14336, 4096):
        return Plan(groups, 224, 5 if groups == 2 else 4)
    if not gated and (columns, depth) == (4096, 4096):
        if blocks == 2:
            return Plan(groups, 128, 6 if groups == 2 else 5, split=2)
        return Plan(2, 64, 9, split=2) if groups == 2 else None
    return None

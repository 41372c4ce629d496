"""How gated linears of 65 to 384 rows are cut into the blocks of `many_rows.cu`."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = 128
"""Blocks that a plan wants to run at once, one per multiprocessor; above 192 rows it has twice as many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one linear is cut into blocks; `many_rows.cu` says what each number means."""

    groups: int
    columns: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of x per block."""
        return 64 * self.groups

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + 1024


def plan_for(rows: int, columns: int, depth: int) -> Plan | None:
    """How a gated linear is cut; None where a library matmul is as fast, or where nobody has measured.

    Args:
        columns: of the output; there are twice as many rows of weights.
        depth: input columns.
    """
    if (columns, depth) == (12288, 4096) and 64 < rows <= 128:
        return Plan(2, 192, 5)
    if not 64 < rows <= 384 or (columns, depth) != (14336, 4096):
        return None
    groups = 2 if rows <= 128 or 192 < rows <= 256 else 3
    return Plan(groups, 224, 5 if groups == 2 else 4)

"""How linears of 65 to 384 rows are cut into the blocks of `many_rows.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCKS = 128
"""Blocks that a plan wants to run at once, one per multiprocessor; above 192 rows it has twice as many."""


Kind = Literal["GATED", "PARTS"]
"""What follows the product; `many_rows.cu` says what."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one linear is cut into blocks; `many_rows.cu` says what each number means."""

    groups: int
    columns: int
    stages: int
    split: int = 1
    kind: Kind = "GATED"

    @property
    def rows(self) -> int:
        """Rows of x per block."""
        return 64 * self.groups

    @property
    def written(self) -> int:
        """Output columns per block."""
        return self.columns // 2 if self.kind == "GATED" else self.columns

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + 1024


def plan_for(kind: Kind, rows: int, columns: int, depth: int) -> Plan | None:
    """How a linear is cut; None where a library matmul is as fast, or where nobody has measured.

    Args:
        columns: of the output; a gated linear has twice as many rows of weights.
        depth: input columns.
    """
    if not 64 < rows <= 384:
        return None
    if kind == "PARTS":
        if rows <= 128 and columns == 4096 and depth in (12288, 14336):
            return Plan(2, 128, 7, 4, "PARTS")
        return Plan(3, 128, 5, 4, "PARTS") if rows <= 192 and (columns, depth) == (4096, 14336) else None
    if (columns, depth) == (12288, 4096) and rows <= 128:
        return Plan(2, 192, 5)
    if (columns, depth) != (14336, 4096):
        return None
    groups = 2 if rows <= 128 or 192 < rows <= 256 else 3
    return Plan(groups, 224, 5 if groups == 2 else 4)

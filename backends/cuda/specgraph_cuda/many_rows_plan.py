"""The linears that `many_rows.cu` takes, mostly of 33 to 384 rows, and the blocks that each is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCKS = 128
"""The blocks that a plan wants to run at once, one per multiprocessor. Above 192 rows a plan has twice as many."""


MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. On a device with fewer, some blocks run after the others."""

_MOST_BYTES, _RESERVED = 227 << 10, 1024
"""Bytes of shared memory that all blocks of one multiprocessor share, and the bytes that the system takes per block."""

_FEW, _FEW_COLUMNS = 32, 17408
"""Up to `_FEW` rows other kernels are faster, except for gated linears of `_FEW_COLUMNS` or more output columns."""

_WIDE = {(6144, 4096), (10240, 8192)}
"""(output columns, input columns) of linears with few input columns that were faster here. Three other such linears
were slower."""

Kind = Literal["GATED", "PARTS", "BEST"]
"""The work that follows the product; `many_rows.cu` describes each kind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of one linear; `many_rows.cu` explains each number."""

    groups: int
    columns: int
    stages: int
    split: int = 1
    kind: Kind = "GATED"

    @property
    def rows(self) -> int:
        """Return the rows of x per block."""
        return 64 * self.groups

    @property
    def written(self) -> int:
        """Return the output columns per block."""
        return self.columns // 2 if self.kind == "GATED" else self.columns

    @property
    def memory(self) -> int:
        """Return the bytes of shared memory."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + 1024


def plan_for(kind: Kind, rows: int, columns: int, depth: int) -> Plan | None:
    """Return the plan of a linear. None if another kernel is as fast, or if the shape was not measured.

    Args:
        columns: output columns; the weight of a gated linear has two rows for each.
        depth: input columns.
    """
    if not 0 < rows <= 384 or (rows <= _FEW and not (kind == "GATED" and columns >= _FEW_COLUMNS)):
        return None
    if kind == "BEST":
        return _best(rows, columns) if depth >= 2048 else None
    if rows <= 64:
        return _gated(columns, depth) if kind == "GATED" else _parts(columns, depth)
    if kind == "PARTS":
        least = {(4096, 14336): 129, (4096, 12288): 161}.get((columns, depth), 193)  # below, the library is as fast
        return Plan(3, 96, 6, 3, "PARTS") if least <= rows <= 192 else None
    if (columns, depth) == (12288, 4096) and rows <= 128:
        return Plan(2, 192, 5)
    if (columns, depth) != (14336, 4096):
        return None
    groups = 2 if rows <= 128 or 192 < rows <= 256 else 3
    return Plan(groups, 224, 5 if groups == 2 else 4)


def _gated(columns: int, depth: int) -> Plan | None:
    """Return the plan of a gated linear of up to 64 rows: two blocks per multiprocessor if they fit. Otherwise one.

    Of two blocks, one loads its next tiles while the other writes its results.
    """
    if depth < 2048 or columns < 9728:
        return None
    for blocks in (2, 1):
        written = min(8 * ceil_div(columns, 8 * blocks * MULTIPROCESSORS), 128)
        stages = _stages(2 * written, _MOST_BYTES // blocks - _RESERVED)
        if stages >= 3:
            return Plan(1, 2 * written, stages)
    return None


def _parts(columns: int, depth: int) -> Plan | None:
    """Return the plan of a product in parts, up to 64 rows: one block per multiprocessor, with nearly equal shares of
    the weights."""
    if not ((depth >= 8192 and depth >= 2 * columns) or (columns, depth) in _WIDE):
        return None

    def cost(width: int) -> float:
        """Return the input columns that one block reads, plus the cost of writing and adding the parts in that unit."""
        tiles = ceil_div(columns, width)
        split = max(1, MULTIPROCESSORS // tiles)
        return depth / (tiles * split) + 8 * split

    width = min((96, 128), key=cost)
    split = max(1, MULTIPROCESSORS // ceil_div(columns, width))
    return Plan(1, width, _stages(width, _MOST_BYTES), split, "PARTS")


def _best(rows: int, columns: int) -> Plan | None:
    """Return the plan of a linear if only the largest output of each row is wanted.

    Up to 64 rows it has two blocks per multiprocessor, which all run at once. For more rows it has one block, of 248
    columns: a block can have 256.
    """
    if rows <= 64:
        return Plan(1, 128, 4, 1, "BEST") if 8192 <= columns <= 2 * 128 * MULTIPROCESSORS else None
    if columns < 32000 or (rows > 128 and columns > 248 * MULTIPROCESSORS) or rows > 256:
        return None
    return Plan(3, 248, 3, 1, "BEST") if 128 < rows <= 192 else Plan(2, 248, 4, 1, "BEST")


def _stages(columns: int, memory: int) -> int:
    """Return the number of stages that fit in `memory` bytes, at most 12: more gain nothing. A stage is a tile of 64
    rows of x and one of `columns` rows of weights."""
    return min(12, (memory - 1024) // (128 * (64 + columns) + 16))


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)

"""Tiles per linear, tuned on an H200 by benchmarks/tune_linears.py (see benchmarks/NOTES-h200.md)."""

from __future__ import annotations

from specgraph.kernels.triton.launch import Tile, default_tile

# rows -> tile. A linear with few output columns needs narrow tiles, so that every multiprocessor streams weights.
_NARROW = {16: Tile(32, 256, 2, 6, 512), 32: Tile(32, 256, 2, 5, 512), 64: Tile(32, 128, 4, 6, 256)}
_MEDIUM = {16: Tile(16, 512, 2, 3, 512), 32: Tile(16, 256, 2, 4, 512)}
_GATE_UP = {16: Tile(128, 128, 4, 3, 64), 32: Tile(128, 128, 4, 3, 64), 64: Tile(128, 64, 4, 4, 64)}
_HEAD = {16: Tile(128, 128, 4, 4, 64), 32: Tile(128, 128, 4, 3, 64), 64: Tile(128, 128, 4, 4, 64)}


def tile_for(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
    """The tile of one linear; see `specgraph.kernels.triton.launch.ChooseTile`."""
    if depth % 512:
        return default_tile(kind, rows, columns, depth)
    if kind == "gate_up":
        return _GATE_UP[rows]
    if kind == "head":
        return _HEAD[rows]
    if columns <= 32 * 132:
        return _NARROW[rows]
    if columns <= 64 * 132:
        return _MEDIUM.get(rows)
    return _GATE_UP[rows]

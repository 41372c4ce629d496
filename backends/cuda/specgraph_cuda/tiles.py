"""Tiles per linear, tuned on an H200 by benchmarks/tune_linears.py (see benchmarks/NOTES-h200.md)."""

from __future__ import annotations

from specgraph.kernels.triton.launch import Tile, default_tile


def tile_for(kind: str, rows: int, columns: int, depth: int) -> Tile | None:
    """The tile of one linear; see `specgraph.kernels.triton.launch.ChooseTile`."""
    return default_tile(kind, rows, columns, depth)

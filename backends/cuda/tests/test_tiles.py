"""The tiles that linears take on GPUs with the shared memory of an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specgraph_cuda.kernels import tile_for


@pytest.mark.parametrize("columns", [4096, 8192, 11008, 12288, 14336, 28672])
def test_gated_linears_are_spread_over_the_multiprocessors(columns: int) -> None:
    """Tiles of 128 columns make 96 programs of 12288 columns, and a quarter of an H200's 132 multiprocessors idles."""
    tile = tile_for("gate_up", 16, columns, 4096)
    assert tile is not None
    assert -(-columns // tile.columns) >= (104 if columns > 8192 else 32)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (6144, 4096), (6144, 8192), (8192, 8192), (8192, 6144)])
def test_the_library_multiplies_only_where_it_was_timed(rows: int, columns: int, depth: int) -> None:
    """At 17 to 32 rows that is qkv of an 8B EAGLE-3 head; o_proj of a 70B (8192 x 8192) was not timed."""
    assert (tile_for("linear", rows, columns, depth) is None) == ((rows, columns, depth) == (32, 6144, 8192))

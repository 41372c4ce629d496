"""The tiles that linears and attention take on GPUs with the shared memory of an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from specgraph_cuda.kernels import attention_for, tile_for

from specgraph.kernels.launch import AttentionShape


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


def llama_8b(requests: int, rows: int, context: int) -> AttentionShape:
    return AttentionShape(
        rows=4 * rows, pairs=8 * requests, context=context, head_dim=128, itemsize=2, cache_itemsize=2,
        compute_units=132,
    )  # fmt: skip


@pytest.mark.parametrize("requests", [32, 48, 64, 66, 67, 80, 96, 99, 100, 128, 160, 256])
def test_draft_attention_leaves_the_least_of_its_last_wave_empty(requests: int) -> None:
    """Two programs per multiprocessor with loads ahead (5 stages), or four without: whichever needs fewer places."""
    tile = attention_for(llama_8b(requests, rows=1, context=1280))
    programs = 8 * requests * tile.splits
    at_once = 132 * (2 if tile.stages == 5 else 4)
    places = [-(-programs // count) * count for count in (132 * 4, 132 * 2)]
    assert -(-programs // at_once) * at_once == min(places)
    assert (tile.stages == 5) == (places[1] < places[0])


@pytest.mark.parametrize(("requests", "context", "least"), [(8, 4096, 512), (9, 4096, 1024), (16, 4096, 1024)])
def test_contexts_that_fill_the_device_uncut_are_cut_into_longer_splits(
    requests: int, context: int, least: int
) -> None:
    tile = attention_for(llama_8b(requests, rows=6, context=context))
    assert (tile.splits, tile.span) == (4, least)

"""Tiles that `specgraph tune` kept: what a file says is what is chosen, and a broken file changes nothing."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgraph.kernels.triton.launch import Tile
from specgraph.kernels.triton.tile_table import LinearShape, TileTable, cache_file, read_tiles, write_tiles

SHAPES = st.builds(LinearShape, st.sampled_from(["linear", "gate_up", "head"]), *[st.integers(1, 10**6)] * 3)
TILES = st.none() | st.builds(Tile, *[st.integers(1, 512)] * 5)
SHIPPED = Tile(1, 2, 3, 4, 5)


@given(st.dictionaries(SHAPES, TILES), st.lists(SHAPES))
def test_a_file_says_what_was_written(tmp_path_factory, tiles, others):
    path = tmp_path_factory.mktemp("cache") / "deep" / "t.json"
    write_tiles(path, tiles, {"device": "x"})
    table = TileTable(lambda *shape: SHIPPED, read_tiles(path))
    for shape in [*tiles, *others]:
        assert table(*shape) == tiles.get(shape, SHIPPED)
    assert list(table.asked) == list(dict.fromkeys([*tiles, *others]))
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tiles": [{"shape": ["linear", 1]}]}', '{"tiles": [{"shape": [], "tile": {"columns": 1}}]}',
     '{"tiles": [{"shape": ["linear", 1, 2, 3], "tile": {"width": 1}}]}'],
)  # fmt: skip
def test_a_broken_file_is_named_and_not_used(tmp_path, caplog, text):
    (tmp_path / "t.json").write_text(text)
    with caplog.at_level(logging.WARNING, "specgraph"):
        assert read_tiles(tmp_path / "t.json") == {}
    assert "t.json" in caplog.text
    assert "specgraph tune" in caplog.text


def test_no_file_is_no_tiles_and_no_word(tmp_path, caplog):
    assert read_tiles(tmp_path / "none.json") == {}
    assert not caplog.records


def test_the_file_is_in_the_users_cache_by_device_and_triton(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_file("NVIDIA H200 / x", "3.6.0")
    assert path.parent == tmp_path / "specgraph"
    assert path.name == "tiles-nvidia-h200-x-triton-3.6.0.json"
    assert path != cache_file("NVIDIA H200 / x", "3.7.0")

"""Tiles that `specgraph tune` kept: what a file says is what is chosen, and a broken file changes nothing."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specgraph.device.cpu import CpuPlatform
from specgraph.ops.triton.launch import Tile
from specgraph.ops.triton.tile_table import LinearShape, TileTable, cache_file, read_tiles, write_tiles
from specgraph.tools import tune
from specgraph.tools.shapes import random_head, shape_named
from specgraph.tools.tune import is_faster

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


@given(st.dictionaries(SHAPES, TILES), st.dictionaries(SHAPES, TILES))
def test_other_tiles_are_chosen_within_using_and_only_there(tiles, others):
    table = TileTable(lambda *shape: SHIPPED, dict(tiles))
    shapes = [*others, *tiles]
    with suppress(KeyError), table.using(others):
        assert [table(*shape) for shape in shapes] == [others.get(shape, SHIPPED) for shape in shapes]
        raise KeyError
    assert [table(*shape) for shape in shapes] == [tiles.get(shape, SHIPPED) for shape in shapes]


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([[100.0, 99.0]], True),
        ([[100.0, 99.6]], False),  # less than two captures of one graph differ by
        ([[1000.0, 1010.0], [10.0, 9.0]], True),  # every batch size counts alike
        ([[1442.4, 1446.0], [2045.7, 2028.0]], False),
    ],
)
def test_only_tiles_that_make_whole_proposes_faster_are_kept(times, kept):
    assert is_faster(times) is kept


def test_whole_proposes_are_captured_with_the_tiles_of_each_table(monkeypatch):
    """The CPU platform, whose ops choose no tile, shows what is captured while which table is in force is recorded."""
    platform, table, seen = CpuPlatform(), TileTable(lambda *shape: SHIPPED), []
    shape = LinearShape("linear", 16, 32, 64)
    tables = [{shape: Tile(1, 1, 1, 1)}, {shape: Tile(2, 2, 2, 2)}]
    monkeypatch.setattr(tune, "triton_ops", lambda platform: SimpleNamespace(options=SimpleNamespace(tile=table)))
    capture = tune.Drafter.capture

    def recorded(drafter):
        seen.append((drafter.config.max_num_requests, drafter.resolution.lowering, table(*shape).columns))
        capture(drafter)

    monkeypatch.setattr(tune.Drafter, "capture", recorded)
    with torch.inference_mode():
        head = random_head(shape_named("eagle3-tiny-128"), platform.device, torch.float32, 64)
        times = tune.propose_times(platform, head, [2, 1], 1, tables, captures=1, replays=1)
    assert seen == [(n, "merged", columns) for n in (2, 1) for columns in (1, 2)]
    assert all(len(row) == 2 and min(row) > 0 for row in times)
    assert len(times) == 2

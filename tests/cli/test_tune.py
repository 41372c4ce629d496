"""`specgraph tune`: what it measured is kept only if whole proposes are faster with it. No GPU: times are given."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import specgraph.device
import specgraph.tools.tune
from specgraph.cli.tune import tune
from specgraph.device.cpu import CpuPlatform
from specgraph.ops.triton.launch import Tile
from specgraph.ops.triton.tile_table import LinearShape, cache_file, read_tiles, write_tiles

SHAPE, OTHER = LinearShape("linear", 16, 4096, 4096), LinearShape("head", 16, 32000, 4096)
KEPT_BEFORE, MEASURED = Tile(16, 64), Tile(64, 128)


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The settings that `propose_times` is asked to compare; `times` is what it answers."""
    asked = {"times": []}

    def propose_times(platform, head, requests, k, tables):
        asked.update(requests=requests, tables=[dict(table) for table in tables])
        return asked["times"]

    steps = {
        "triton_ops": lambda platform: None,
        "shapes_of": lambda *arguments: [SHAPE],
        "tune": lambda *arguments: {SHAPE: [(9.0, MEASURED), (10.0, None)]},
        "propose_times": propose_times,
    }
    for name, step in steps.items():
        monkeypatch.setattr(specgraph.tools.tune, name, step)
    platform = CpuPlatform()
    platform.info = replace(platform.info, versions={"triton": "3.6.0"})  # part of the name of the file
    monkeypatch.setattr(specgraph.device, "open_platform", lambda name: platform)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked["file"] = cache_file(platform.info.device_name, "3.6.0")
    write_tiles(asked["file"], {SHAPE: KEPT_BEFORE, OTHER: None}, {})
    return asked


@pytest.mark.parametrize(("after", "kept"), [(980.0, True), (1000.0, False)])
def test_tiles_are_kept_if_proposes_are_faster(compared, tmp_path, capsys, after, kept):
    compared["times"] = [[1000.0, after], [500.0, 499.0]]
    tune(shape="eagle3-tiny-128", requests="1,8", json=str(tmp_path / "out.json"))
    before, measured = {SHAPE: KEPT_BEFORE, OTHER: None}, {SHAPE: MEASURED, OTHER: None}
    assert compared["requests"] == [1, 8]
    assert compared["tables"] == [before, measured]
    assert read_tiles(compared["file"]) == (measured if kept else before)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["kept"] is kept
    assert report["proposes"][0] == {"requests": 1, "before_us": 1000.0, "tuned_us": after}
    said = capsys.readouterr()
    assert f"1000.0 us with the tiles before, {after} with these" in said.out
    assert ("not kept" in said.err) is not kept

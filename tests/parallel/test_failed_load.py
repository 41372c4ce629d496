"""A rank whose load fails after it has joined the others leaves their group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from specgraph_models.errors import CheckpointError
from specgraph_run.decoder.layout import ParallelLayout, join_layout
from specgraph_run.options import GeneratorOptions
from specgraph_run.text import load

from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError, RankError, SpecgraphError
from specgraph.parallel import ranks_named


@pytest.fixture
def layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ParallelLayout]:
    """Loads join a group of one process, and are listed here."""
    made: list[ParallelLayout] = []

    def join(device: torch.device, **asked: object) -> ParallelLayout:
        made.append(join_layout(device, init_method=f"file://{tmp_path / 'store'}", rank=0, timeout=60))
        return made[-1]

    monkeypatch.setattr(load, "join_layout", join)
    return made


def load_from_an_empty_folder(folder: Path) -> None:
    load.load_generator(folder, folder, platform=CpuPlatform(), tensor_parallel=2)


def load_with_a_wrong_option(_: Path) -> None:
    load.load_generator(platform=CpuPlatform(), tensor_parallel=2, max_model_len=4)


@pytest.mark.parametrize(
    ("fails", "error"), [(load_from_an_empty_folder, CheckpointError), (load_with_a_wrong_option, ConfigError)]
)
def test_a_failed_load_leaves_the_group(
    layouts: list[ParallelLayout], tmp_path: Path, fails: Callable[[Path], None], error: type[SpecgraphError]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(error):
        fails(tmp_path / "empty")
    with pytest.raises(RankError, match="were closed"):
        ranks_named(layouts[0].ranks.name)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_comparison_that_fails_on_every_rank_leaves_the_group_open(
    layouts: list[ParallelLayout], monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    """The others may still read from the store, which ends with the first rank's group."""

    def differs(*_: object) -> None:
        raise RankError("rank 1 has another option", everywhere=everywhere)

    monkeypatch.setattr("specgraph_models.parallel.ranks.Ranks.same", differs)
    with pytest.raises(RankError, match="another option"):
        load.join(CpuPlatform(), GeneratorOptions(tensor_parallel=2), {})
    assert torch.distributed.is_initialized() is everywhere
    layouts[0].ranks.close()
    assert not torch.distributed.is_initialized()

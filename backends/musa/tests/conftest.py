"""Every test here runs on the simulated torch_musa, never on a Moore Threads device.

SPECGRAPH_MUSA_SIMULATOR is what runs underneath: "cpu" (the default) or "cuda".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
os.environ.setdefault("SPECGRAPH_MUSA_SIMULATOR", "cpu")
os.environ.pop("SPECGRAPH_MUSA_MERGED", None)
sys.path[:0] = [str(HERE.parent / "simulator"), str(HERE.parents[2] / "tests"), str(HERE)]

from torch_musa import simulated

from specgraph.reference import CpuPlatform
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy


@pytest.fixture(autouse=True)
def clean_simulator() -> Iterator[None]:
    """The defects of 2.7.1 before each test, and no corruption after it."""
    simulated.restore()
    yield
    faults = list(simulated.faults)
    simulated.restore()
    assert not faults, faults


@pytest.fixture(scope="session")
def musa() -> MusaPlatform:
    """Simulated device 0, with the policy of an empty environment."""
    simulated.restore()
    return MusaPlatform(0, Policy())


@pytest.fixture(scope="session")
def forced() -> MusaPlatform:
    """The same with SPECGRAPH_MUSA_MERGED=force."""
    simulated.restore()
    return MusaPlatform(0, Policy(merged="forced"))


@pytest.fixture(scope="session")
def cpu() -> CpuPlatform:
    """What the musa platform's tokens are compared with."""
    return CpuPlatform()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny random target and its EAGLE-3 head."""
    from tiny_checkpoints import write_eagle3, write_target

    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target"), write_eagle3(root / "eagle3")

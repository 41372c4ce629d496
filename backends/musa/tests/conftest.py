"""Every test here runs on the simulated torch_musa, never on a Moore Threads device."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specgraph.cpu import CpuPlatform

    from specgraph_musa.platform import MusaPlatform

# Read when torch_musa is imported, so set before any test module is.
os.environ.setdefault("SPECGRAPH_MUSA_SIMULATOR", "cpu")
os.environ.pop("SPECGRAPH_MUSA_MERGED", None)
os.environ["SPECGRAPH_MUSA_TRIALS"] = "skip"  # in this process, where each test sets up the machine


@pytest.fixture(autouse=True)
def clean_simulator() -> Iterator[None]:
    """A healthy machine before each test, and no corruption after it."""
    from torch_musa import simulated

    simulated.restore()
    yield
    faults = list(simulated.faults)
    simulated.restore()
    assert not faults, faults


def _opened(**choices: str) -> MusaPlatform:
    from specgraph_musa.platform import MusaPlatform
    from specgraph_musa.policy import Policy
    from torch_musa import simulated

    simulated.restore()
    return MusaPlatform(0, Policy(**choices))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def musa() -> MusaPlatform:
    """Simulated device 0, with the policy of an empty environment."""
    return _opened()


@pytest.fixture(scope="session")
def forced() -> MusaPlatform:
    """The same with SPECGRAPH_MUSA_MERGED=force."""
    return _opened(merged="forced")


@pytest.fixture(scope="session")
def cpu() -> CpuPlatform:
    """The generator that the musa platform's tokens are compared with."""
    from specgraph.cpu import CpuPlatform

    return CpuPlatform()


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch stays loaded: without this the collector goes through all of it again and again."""
    gc.collect()
    gc.freeze()

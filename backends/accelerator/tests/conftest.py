"""Every test here runs on the device of `device/`: threads of the CPU that torch drives as an accelerator."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

import torch_asynccpu  # noqa: F401  # registers the device with torch

if TYPE_CHECKING:
    from specgraph.cpu import CpuPlatform

    from specgraph_accelerator.platform import AcceleratorPlatform

os.environ["SPECGRAPH_ACCELERATOR_TRIALS"] = "skip"  # in this process, and nothing kept in the user's folder


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device 0."""
    return torch.device("asynccpu", 0)


@pytest.fixture(scope="session")
def platform() -> AcceleratorPlatform:
    """Device 0 as a platform."""
    from specgraph_accelerator.platform import AcceleratorPlatform

    return AcceleratorPlatform(0)


@pytest.fixture(scope="session")
def cpu() -> CpuPlatform:
    """The generator that the platform's tokens are compared with."""
    from specgraph.cpu import CpuPlatform

    return CpuPlatform()


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    """An error that an op raised on the device comes out with the test that caused it."""
    yield
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch stays loaded: without this the collector goes through all of it again and again."""
    gc.collect()
    gc.freeze()

"""Tests that need a GPU take the `platform` fixture, which skips with the probe's reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from specgraph_cuda.backend import open_device, probe

from specgraph.device import Platform


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    found = probe()
    if not found.available:
        pytest.skip(found.reason)
    opened = open_device(0)
    yield opened
    opened.close()


@pytest.fixture
def updating(platform: Platform) -> Iterator[Platform]:
    if not platform.capabilities.task_update:
        pytest.skip(platform.capabilities.task_update.reason)
    yield platform
    platform.synchronize()

"""Tests that need a GPU take the `platform` fixture, which skips with the probe's reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from specgraph_cuda.backend import open_device
from specgraph_cuda.probe import probe

from specgraph.platforms import Platform


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    found = probe()
    if not found.available:
        pytest.skip(found.reason)
    opened = open_device(0)
    yield opened
    opened.close()

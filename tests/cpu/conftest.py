from __future__ import annotations

import pytest

from specgraph.cpu import CpuPlatform


@pytest.fixture
def platform():
    return CpuPlatform()


@pytest.fixture
def side(platform):
    """A second stream."""
    return platform.stream()

"""Fixtures of the tests of graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specgraph.cpu.platform import CpuPlatform


@pytest.fixture
def platform() -> Iterator[CpuPlatform]:
    platform = CpuPlatform()
    yield platform
    platform.close()

"""Fixtures of the suite's cases, on the `cpu` platform."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from specgraph_conformance.draft_rig import close_rigs

from specgraph.cpu import CpuPlatform
from specgraph.device import Platform


@pytest.fixture
def platform() -> Iterator[Platform]:
    """A platform of the test's own; all rigs are closed after it."""
    with torch.no_grad():
        yield CpuPlatform()
    close_rigs()


@pytest.fixture
def seed() -> int:
    return 0

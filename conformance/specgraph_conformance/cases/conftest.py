"""Fixtures of the suite: the platform under test, and the seed of all generated inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from specgraph.device import Discovered, Platform
from specgraph_models.parallel import Ranks

from specgraph_conformance.case import CORE_ATTENTION
from specgraph_conformance.draft_rig import close_rigs
from specgraph_conformance.plugin import SESSION
from specgraph_conformance.rank import process_group
from specgraph_conformance.session import tested_attention
from specgraph_conformance.task_rig import Tasks


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """The platform under test. It is idle before and after each case, and all rigs are closed after it."""
    opened: Platform = request.config.stash[SESSION].platform
    opened.synchronize()
    with torch.no_grad():
        yield opened
    if not opened.is_capturing():
        close_rigs()
        opened.synchronize()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Discovered:
    """The entry point of the platform's backend."""
    return request.config.stash[SESSION].item


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the run."""
    return request.config.stash[SESSION].seed


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """The factor by which a random case multiplies its examples."""
    option: Any = request.config.getoption
    return option("--specgraph-examples")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a case with the argument `attention` once per attention backend: the core's two, and each of the device's."""
    if "attention" in metafunc.fixturenames:
        session = metafunc.config.stash.get(SESSION, None)
        own = () if session is None else tested_attention(session.platform)
        metafunc.parametrize("attention", (*CORE_ATTENTION, *own))


@pytest.fixture
def ranks(platform: Platform, tmp_path: Path) -> Iterator[Ranks]:
    """A group of one rank, over the device's own communication library."""
    with process_group(platform, 0, 1, str(tmp_path / "store")) as joined:
        yield joined


@pytest.fixture
def tasks(platform: Platform) -> Iterator[Tasks]:
    """One captured attention op."""
    made = Tasks(platform)
    yield made
    made.graph.close()

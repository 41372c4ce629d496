"""Every test here runs through the unmodified torch_npu on the simulated Ascend runtime, never on an NPU.

ASCENDSIM_BUILD is where the runtime was built (`make -C backends/npu/simulator`), ASCENDSIM_FLAVOUR "values" or
"events". npu.mk runs the tests in both flavours and with TASK_QUEUE_ENABLE 0 and 1.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent / "simulator"), str(ROOT / "tests"), str(HERE)]

from forked import Forked

import ascendsim

BUILD = Path(os.environ.get("ASCENDSIM_BUILD", HERE.parent / "simulator" / "build"))
FLAVOUR: ascendsim.Flavour = "events" if os.environ.get("ASCENDSIM_FLAVOUR") == "events" else "values"
SHAPES = "fia-dtype,fia-head-dim,fia-block-size,fia-latent,atb-paged"
"""Limits that are off where a test does not ask for them: to give the cpu platform's tokens, most tests run small heads
in float32, which no device takes. `test_limits.py` runs what a device takes, with all limits on."""
RUNTIME = ascendsim.load(BUILD, FLAVOUR)
FORKED = Forked(RUNTIME)
os.environ.update(ASCENDSIM_DEVICES="2", ASCENDSIM_HANG_SECONDS="5", ASCENDSIM_LENIENT=SHAPES)


def pytest_configure(config: pytest.Config) -> None:
    """Markers of these tests."""
    config.addinivalue_line("markers", "once: the same in all four ways of running, so npu.mk runs it in one")
    config.addinivalue_line("markers", "events: of the flavour that has no waits for values")


@pytest.fixture(scope="session")
def loaded() -> ascendsim.Runtime:
    """The runtime of this process."""
    return RUNTIME


@pytest.fixture
def runtime(loaded: ascendsim.Runtime) -> Iterator[ascendsim.Runtime]:
    """The runtime with a plain schedule and a clean report; a test that leaves a violation behind fails."""
    loaded.schedule(0, 0, 0)
    loaded.hang_seconds(5)
    loaded.strict("all")
    loaded.lenient(*SHAPES.split(","))
    loaded.reset_report()
    yield loaded
    loaded.schedule(0, 0, 0)
    assert loaded.report()["violations"] == []


@pytest.fixture
def all_limits(runtime: ascendsim.Runtime) -> None:
    """Every limit of the runtime on: the test runs shapes and dtypes that a device takes."""
    runtime.strict("all")


@pytest.fixture(scope="session")
def npu(loaded: ascendsim.Runtime):
    """Device 0 as a platform."""
    from specgraph_npu.platform import NpuPlatform

    return NpuPlatform(0)


@pytest.fixture
def run_script(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_script(code, **options)`: run code in a process of its own, for what ends a process or its task queue.

    `options` in capitals are environment variables, the others are the simulator's. The code finds `runtime` loaded.
    """

    def run(code: str, **options: str | int):
        simulator = {"lenient": SHAPES, **options}
        environment = {name if name.isupper() else f"ASCENDSIM_{name.upper()}": str(v) for name, v in simulator.items()}
        return FORKED.run(code, tmp_path_factory.mktemp("script"), environment)

    return run


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that forks."""
    FORKED.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is of the other flavour."""
    for item in items:
        if FLAVOUR == "values" and item.get_closest_marker("events"):
            item.add_marker(pytest.mark.skip(reason="of the flavour events"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """torch stays loaded: without this the collector goes through all of it again and again."""
    gc.collect()
    gc.freeze()

"""Where the tests of Triton kernels run: on a GPU, or without one in Triton's interpreter (TRITON_INTERPRET=1).

Importing it skips the module that does where Triton is not installed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

from specgraph import kernels
from specgraph.kernels.triton.implement import TritonOps
from specgraph.kernels.triton.launch import LaunchOptions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def ops() -> Any:
    """What is tested: the registered ops on a GPU, else the same kernels interpreted."""
    return TritonOps(LaunchOptions()) if INTERPRETED else kernels


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device; skips where it is a GPU and there is none. A module that imports it uses it."""
    if not INTERPRETED:
        request.getfixturevalue("platform")
    return DEVICE

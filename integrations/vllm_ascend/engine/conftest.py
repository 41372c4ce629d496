"""Tests through the engine itself. VLLM_ASCEND_PYTHON is the Python of its environment (`make test-vllm-ascend`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ROOMS = [
    ".", "models", "run", "conformance", "integrations/plugin", "backends/npu", "backends/npu/engine",
    "integrations/vllm_ascend", "integrations/vllm_ascend/engine",
]  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """The environment of vLLM and vllm-ascend, with the simulated runtime."""

    python: str
    models: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: int = 1800, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own."""
        return subprocess.run(
            [self.python, *command], env=self.environment | variables, capture_output=True, text=True, timeout=timeout
        )


@pytest.fixture(scope="session")
def lab() -> Lab:
    python, build = os.environ.get("VLLM_ASCEND_PYTHON"), os.environ.get("ASCENDSIM_BUILD")
    if python is None or build is None:
        pytest.skip("no environment of vLLM and vllm-ascend: make test-vllm-ascend")
    values = f"{build}/values"
    environment = os.environ | {
        "PYTHONPATH": ":".join(str(ROOT / room) for room in ROOMS), "OMP_NUM_THREADS": "1",
        "ASCEND_HOME_PATH": values, "ASCEND_OPP_PATH": f"{values}/opp", "LD_LIBRARY_PATH": f"{values}/lib64",
        "ASCENDSIM_DEVICES": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    return Lab(python, Path(os.environ["VLLM_ASCEND_MODELS"]), environment)


@pytest.fixture(scope="session")
def served(lab, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """`served(way)`: what `served.py` saw, which runs once for each way, in a process of its own."""
    folder = tmp_path_factory.mktemp("served")
    known: dict[str, dict[str, Any]] = {}

    def run(way: str) -> dict[str, Any]:
        if way not in known:
            out = folder / f"{way}.json"
            done = lab.run(str(HERE / "served.py"), way, str(lab.models), str(out))
            assert out.exists(), done.stdout[-4000:] + done.stderr[-6000:]
            known[way] = json.loads(out.read_text())
        return known[way]

    return run

"""The probe on machines without a GPU, and what it says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import specgraph_cuda
import torch
from specgraph_cuda.backend import open_device, probe
from specgraph_cuda.probe import TASK_UPDATE, launcher, task_update_support, triton_support

from specgraph.device import discover
from specgraph.errors import PlatformError


def test_importing_the_plugin_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> None:
        raise AssertionError("a device was touched")

    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    monkeypatch.delitem(sys.modules, "specgraph_cuda.backend", raising=False)
    importlib.import_module("specgraph_cuda.backend").specgraph_backend()


def test_cpu_build_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    found = probe()
    assert not found.available
    assert found.reason.startswith("torch 2.13.0+cpu has no CUDA support: install a CUDA build")


def test_rocm_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "ROCm" in probe().reason


def test_driver_too_old_is_torchs_own_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    found = probe()
    assert not found.available
    assert found.reason == "The NVIDIA driver on your system is too old (found version 11040). Please update."


def test_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no GPU" in probe().reason


def test_opening_without_a_gpu_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(PlatformError, match="not available"):
        open_device(0)


def test_without_triton_the_capability_says_what_runs_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found = triton_support(torch.device("cuda"))
    assert not found
    assert "pip install triton" in found.reason
    assert "plain torch ops run, slower" in found.reason


def test_discovery_finds_the_plugin() -> None:
    found = discover()
    if "cuda" not in found:
        pytest.skip("specgraph-cuda is not installed")
    assert found["cuda"].backend is not None, found["cuda"].reason


def test_without_cuda_bindings_the_capability_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for name in [name for name in sys.modules if name.startswith(("specgraph_cuda.driver", TASK_UPDATE))]:
        monkeypatch.delitem(sys.modules, name)
    platform = SimpleNamespace(tasks=None)
    found = task_update_support(platform)
    assert not found
    assert "pip install cuda-bindings" in found.reason
    assert platform.tasks is None
    assert launcher() is None


def test_without_its_module_there_is_no_task_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TASK_UPDATE, None)
    found = task_update_support(SimpleNamespace(tasks=None))
    assert not found
    assert f"without {TASK_UPDATE}: install the whole one" in found.reason


def test_one_line_of_the_backend_names_the_module_of_task_updates() -> None:
    """All else works without it: see `test_a_gpu_without_task_updates`."""
    folder = Path(specgraph_cuda.__file__).parent
    named = re.compile(r"specgraph_cuda(?:\.| import )task_update")
    found = {path.name: named.findall(path.read_text()) for path in folder.glob("*.py")}
    assert {file: names for file, names in found.items() if names} == {"probe.py": [TASK_UPDATE]}

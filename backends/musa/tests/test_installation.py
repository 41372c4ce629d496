"""Each fault of an installation gives a one-line reason before any device work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from specgraph.device import open_platform
from specgraph.device.discovery import Discovered
from specgraph.errors import PlatformError

import torch_musa
from specgraph_musa import backend
from specgraph_musa.probe import left_out_by_vllm, probe


def loading(error: BaseException):
    def load(name: str):
        raise error

    return load


def package(version: str = "2.13.0", devices: int = 1, available: bool = True, **others) -> SimpleNamespace:
    """torch_musa as it is here, with another version and other devices."""
    names = {name: getattr(torch_musa, name) for name in vars(torch_musa)}
    answers = {"__version__": version, "device_count": lambda: devices, "is_available": lambda: available}
    return SimpleNamespace(**names | answers | others)


def refused(**answers) -> str:
    answers = {"torch_version": "2.13.0", "installed": lambda name: "", "load": lambda name: package(), **answers}
    found = probe(**answers)
    assert not found.available
    assert found.device_count == 0
    assert "\n" not in found.reason
    return found.reason


def test_a_sound_installation():
    assert backend.specgraph_backend().supersedes == {"cuda", "accelerator"}  # which may imitate it
    assert "older than 2.7" in refused(torch_version="2.6.0")
    found = probe(load=lambda name: package(devices=4), torch_version="2.13.0", installed=lambda name: "2.13.0")
    assert found.available
    assert found.device_count == 4
    assert found.versions == {"torch": "2.13.0", "torch_musa": "2.13.0"}


@pytest.mark.parametrize(
    ("named", "remark"),
    [
        (
            "musa,musa_custom_ops",
            "leaves out specgraph's plugin of vLLM: set VLLM_PLUGINS=musa,musa_custom_ops,specgraph",
        ),
        ("musa,specgraph", None),
        (None, None),
    ],
)
def test_a_plugin_that_vllm_musa_s_recipes_leave_out(monkeypatch, named, remark):
    """A recipe's VLLM_PLUGINS names what vLLM loads, and vLLM says nothing of the others."""
    there = {"vllm.platform_plugins": {"musa"}, "vllm.general_plugins": {"musa_custom_ops", "specgraph"}}
    monkeypatch.setattr("specgraph_musa.probe.entry_points", lambda group: SimpleNamespace(names=there[group]))
    said = left_out_by_vllm({} if named is None else {"VLLM_PLUGINS": named})
    assert said.endswith(remark) if remark else said == ""
    there["vllm.platform_plugins"] = set()
    assert left_out_by_vllm({"VLLM_PLUGINS": "musa"}) == ""


def caused(by: str) -> ImportError:
    """torch_musa replaces the loader's message by advice of its own."""
    error = ImportError("Please try another directory")
    error.__cause__ = ImportError(by)
    return error


INSTALL = ["torch_musa is not installed", "github.com/MooreThreads", "not on PyPI", "PyPI's (--extra-index-url)"]
SYMBOL, LIBRARY = "_MUSAC.so: undefined symbol: _ZN3c10", "libmusart.so.4: cannot open shared object file: No such file"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'torch_musa'", name="torch_musa"), INSTALL),
        (ModuleNotFoundError("No module named 'packaging'", name="packaging"), ["'packaging'"]),
        (caused(SYMBOL), ["patches and builds", "undefined symbol", "torch 2.13.0"]),
        (ImportError(LIBRARY), ["LD_LIBRARY_PATH", "libmusart"]),
    ],
)
def test_a_package_that_does_not_load(error, words):
    reason = refused(load=loading(error))
    assert all(word in reason for word in words)


def fail() -> bool:
    raise RuntimeError("MUSA driver version is insufficient\nmore")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"devices": 0}, "sees no device.*MUSA_VISIBLE_DEVICES"),
        ({"available": False}, "sees no device"),
        ({"is_available": fail}, "driver version is insufficient"),
    ],
)
def test_a_runtime_without_a_device(answers, words):
    assert re.search(words, refused(load=lambda name: package(**answers)))


@pytest.mark.parametrize("release", ["2.7.1", "2.9.1.post1", "2.11.0.post2+musa5.2.0", "2.13.0"])
def test_releases_for_each_torch_from_2_7_on(release):
    torch_version = release.partition(".post")[0]
    found = probe(load=lambda name: package(release), torch_version=torch_version, installed=lambda name: release)
    assert found.available


def test_names_that_are_missing_are_listed_before_anything_runs():
    calls: list[str] = []
    found = package(device_count=lambda: calls.append("device_count"), is_available=lambda: calls.append("available"))
    del found.graph_pool_handle, found.memory_reserved
    reason = refused(load=lambda name: found)
    assert "torch_musa 2.13.0 lacks what this backend calls: graph_pool_handle, memory_reserved." in reason
    assert calls == []


@pytest.mark.parametrize("known_before_import", [True, False])
def test_torch_of_another_release(known_before_import):
    loads: list[str] = []

    def load(name: str):
        loads.append(name)
        return package("2.11.0")

    reason = refused(load=load, installed=lambda name: "2.11.0" if known_before_import else "")
    assert "torch_musa 2.11.0 does not fit torch 2.13.0" in reason
    assert bool(loads) is not known_before_import  # a misfit known from metadata is never loaded: it could crash


def test_opening_what_is_not_there_says_the_same(monkeypatch):
    missing = ModuleNotFoundError("no", name="torch_musa")
    monkeypatch.setattr(backend, "probe", lambda: probe(load=loading(missing), installed=lambda name: ""))
    item = Discovered("musa", "specgraph-musa", "0.1.0", backend.specgraph_backend())
    with pytest.raises(PlatformError, match="torch_musa is not installed"):
        open_platform("musa", found={"musa": item})


def test_an_index_that_is_not_there():
    item = Discovered("musa", "specgraph-musa", "0.1.0", backend.specgraph_backend())
    with pytest.raises(PlatformError, match=r"has 1 device\(s\), index 3"):
        open_platform("musa:3", found={"musa": item})
    with pytest.raises(PlatformError, match="there are 1 MUSA devices, index 3"):
        backend.open_device(3)


def test_the_plugin_imports_no_vendor_package_and_the_simulator_is_never_used_unasked():
    """In a new Python with this one's sys.path and no other environment."""
    code = "import sys; import specgraph_musa.backend as b; b.specgraph_backend(); import torch\n"
    code += "print(*(n for n in sys.modules if n.partition('.')[0] in ('torch_musa', 'triton')), flush=True)\n"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"{code}import torch_musa"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.stdout == "\n", done.stderr
    assert done.returncode != 0
    assert "drives no MUSA device" in done.stderr


def test_what_is_simulated_shows(musa):
    assert "simulator" in musa.info.versions["torch_musa"]
    assert "simulated" in musa.info.device_name
    assert "stand-in for torch_musa over" in musa.info.device_kind
    assert musa.info.device.type == "cpu"
    assert torch.empty(1, device=musa.device).device.type != "musa"

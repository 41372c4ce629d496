"""Anything missing on a machine is said in one sentence with what to do, before a vendor's module is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from specgraph_npu import probe

from specgraph.device import discover
from specgraph.errors import CaptureError, PlatformError

PACKAGES = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]


def installed(monkeypatch, torch_npu: str | None, torch: str = "2.13.0+cpu"):
    found = {"torch": torch, "torch_npu": torch_npu}
    monkeypatch.setattr(probe, "installed_version", lambda name: found[name] or "")


def test_without_torch_npu(monkeypatch):
    installed(monkeypatch, None)
    assert probe.missing({}) == "torch_npu is not installed: pip install torch_npu==2.13.0"


def test_with_a_torch_of_another_number(monkeypatch):
    installed(monkeypatch, "2.12.0.post3")
    assert "torch_npu 2.12.0.post3 needs torch 2.12.0, installed is torch 2.13.0" in probe.missing({})


def test_without_cann():
    """In a process without the simulated runtime: torch_npu is installed, libascendcl.so is not."""
    code = (
        "from specgraph_npu.probe import probe\n"
        "answer = probe()\n"
        "print(answer.available, answer.reason)\n"
        "from specgraph_npu.backend import specgraph_backend\n"
        "try: specgraph_backend().open(0)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "import specgraph_npu.platform, specgraph_npu.attention\n"
        "import sys; print('imported', 'torch_npu' in sys.modules)\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND", "LD_LIBRARY"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join(PACKAGES), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("False torch_npu is installed but CANN's libascendcl.so is missing"), done.stderr
    assert lines[1].startswith("PlatformError torch_npu is installed but CANN's libascendcl.so is missing")
    assert lines[2] == "imported False"


def test_launch_blocking_would_hang(monkeypatch):
    assert "would hang" in probe.missing({"ASCEND_LAUNCH_BLOCKING": "1"})
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    from specgraph_npu.platform import NpuPlatform

    with pytest.raises(PlatformError, match="would hang"):
        NpuPlatform(0)


def test_no_such_device(npu):
    from specgraph_npu.platform import NpuPlatform

    with pytest.raises(PlatformError, match="NPU 7 can't be opened"):
        NpuPlatform(7)
    npu.npu.set_device(0)


@pytest.mark.parametrize(
    ("vendor", "why"),
    [
        (
            "capture begin failed.\n[ERROR] Alloc sq cq fail, ret=0x7020010",
            "if few graphs are live, the driver is older than",
        ),
        ("EE9999: no stream left of 1984", "the device has no stream left: live graphs hold streams"),
        ("too many streams are created", "the device has no stream left: live graphs hold streams"),
        (
            "NPU function error: capture, error code is 207008\n[Error]: Stream resources are insufficient.",
            "the device has no stream left: live graphs hold streams",
        ),
        ("error code is 207008: Insufficient_Stream_Resources", "the device has no stream left"),
        ("error code is 207010\n[Error]: Insufficient model resources.", "the device holds no more graphs: close some"),
    ],
)
def test_no_resources_for_a_graph(npu, monkeypatch, vendor, why):
    """Runtime and torch_npu say so in several ways, of which an old driver gives one however few graphs there are."""

    def refuse(self, **options):
        raise RuntimeError(vendor)

    with monkeypatch.context() as patch:
        patch.setattr(npu.npu.NPUGraph, "capture_begin", refuse)
        with pytest.raises(CaptureError, match=why), npu.graph().capture():
            pass
    graph = npu.graph()
    with graph.capture():
        pass
    graph.close()


def test_task_queue_2_has_no_graphs(run_script):
    done = run_script(
        """
        from specgraph_npu.platform import NpuPlatform
        print(NpuPlatform(0).capabilities.graphs)
        """,
        TASK_QUEUE_ENABLE=2,
    )
    assert "TASK_QUEUE_ENABLE" in done.stdout
    assert "level='no'" in done.stdout


def test_discovery_finds_the_backend_when_installed():
    found = discover()
    if "npu" not in found:
        pytest.skip("specgraph-npu is not installed in this environment")
    assert found["npu"].probe().available

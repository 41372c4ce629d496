"""A capability whose trial fails on the device is not claimed; a trial that ends its process withdraws its own only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from specgraph.device import trial_process
from specgraph.errors import PlatformError
from specgraph_conformance.xfails import read_xfails

import torch_asynccpu
from specgraph_accelerator import trials
from specgraph_accelerator.graph import AcceleratorGraph
from specgraph_accelerator.platform import AcceleratorPlatform

CLAIMED = ("graphs", "shared_pool", "merged_loop", "random_in_graph", "host_read_detection")


def test_on_a_sound_device_all_is_claimed() -> None:
    capabilities = AcceleratorPlatform(0).capabilities
    for name in CLAIMED:
        assert getattr(capabilities, name), name
    assert capabilities.float8
    assert capabilities.default_lowering == "merged"


def test_graphs_that_replay_nothing_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorGraph, "_launch", lambda self: None)
    capabilities = AcceleratorPlatform(0).capabilities
    for name in CLAIMED:
        assert not getattr(capabilities, name), name
    assert "a trial on this device failed: a captured x * 3 + 1" in capabilities.graphs.reason
    assert capabilities.default_lowering == "step"


def test_without_a_generator_random_numbers_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_asynccpu, "get_rng_state")
    capabilities = AcceleratorPlatform(0).capabilities
    assert "has no get_rng_state" in capabilities.random_in_graph.reason
    assert capabilities.merged_loop


def test_a_device_that_does_not_see_its_captures_is_the_declared_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device as torch_npu 2.14.0 is behind torch.accelerator."""
    gaps = read_xfails(Path(trials.__file__).with_name("xfails.toml"))
    sound = AcceleratorPlatform(0).capabilities.supports()
    monkeypatch.setattr(AcceleratorPlatform, "is_capturing", lambda self: False)
    unaware = AcceleratorPlatform(0).capabilities.supports()
    assert unaware["graphs"]
    assert [gap.case for gap in gaps if gap.applies(unaware)] == ["capture.is-capturing"]
    assert not any(gap.applies(sound) for gap in gaps)


def test_host_reads_that_go_through_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose capture ends silently at a host read: `item()` gives a value."""
    real = AcceleratorGraph._begin

    def begin(self: AcceleratorGraph, handle: object) -> None:
        real(self, handle)
        self._raw.capture_end()

    monkeypatch.setattr(AcceleratorGraph, "_begin", begin)
    monkeypatch.setattr(AcceleratorGraph, "_end", lambda self: None)
    wrong = trials.host_reads_are_refused(AcceleratorPlatform(0, found={}))
    assert wrong == "item() in a capture raised nothing"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Trials run in processes of their own, which load the device as torch loads a vendor's. The function given back
    puts Python code in front of what those processes do."""
    monkeypatch.delenv("SPECGRAPH_ACCELERATOR_TRIALS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = str(torch_asynccpu.LIBRARY.parent)
    monkeypatch.setenv("ASYNCCPU_BUILD", build)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, build])

    def first(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)

    return first


def test_in_a_process_of_their_own_they_find_the_same_and_are_kept(
    apart: Callable[[str], None], tmp_path: Path
) -> None:
    capabilities = AcceleratorPlatform(0).capabilities
    assert all(getattr(capabilities, name) for name in CLAIMED)
    kept = trial_process.read(tmp_path / "specgraph" / "accelerator-trials.json")
    assert [*kept.values()] == [dict.fromkeys(trials.TRIALS, "")]
    apart("raise SystemExit(3)")  # nothing is started again
    assert AcceleratorPlatform(0).capabilities == capabilities


def test_a_trial_that_ends_its_process_withdraws_its_capability(apart: Callable[[str], None]) -> None:
    apart("import os, specgraph.device.trial as t\nt.a_loop_in_one_graph = lambda platform: os.kill(os.getpid(), 11)\n")
    capabilities = AcceleratorPlatform(0).capabilities
    assert "its trial ended with signal SIGSEGV" in capabilities.merged_loop.reason
    assert "SPECGRAPH_ACCELERATOR_TRIALS=again" in capabilities.merged_loop.reason
    assert all(getattr(capabilities, name) for name in CLAIMED if name != "merged_loop")
    apart("raise SystemExit(3)")  # the fault is kept too: nothing is started again
    assert AcceleratorPlatform(0).capabilities == capabilities


def test_a_device_that_no_other_process_finds_is_told(apart: Callable[[str], None]) -> None:
    apart("import os\nos.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n")
    with pytest.raises(PlatformError, match="SPECGRAPH_ACCELERATOR_TRIALS=skip"):
        AcceleratorPlatform(0)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ

"""A capability whose trial fails on the device is not claimed; a trial that ends its process harms nobody."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from device_memory import live, reserved
from specgraph.capture import resolve
from specgraph.device import trial_process
from specgraph.errors import ConfigError, PlatformError

from specgraph_musa import trials
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa import simulated
from torch_musa.graphs import MUSAGraph, executables

VARIABLE = "SPECGRAPH_MUSA_TRIALS"
CLAIMED = ("graphs", "shared_pool", "merged_loop", "random_in_graph")


def opened() -> MusaPlatform:
    return MusaPlatform(0, Policy(merged="forced"))


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """Run trials in a process of their own; gives the list of arguments of each and the path of the cache file. Further
    processes of a test find what its first one found."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[list[str]] = []
    done, real = [], trial_process.subprocess.run

    def run(command, **options):
        started.append(command[3:])
        done.append(done[0] if done else real(command, **options))
        return done[-1]

    monkeypatch.setattr(trial_process.subprocess, "run", run)
    return started, tmp_path / "specgraph" / "musa-trials.json"


def test_on_a_sound_device_all_is_claimed():
    capabilities = opened().capabilities
    for name in (*CLAIMED, "float8"):
        assert getattr(capabilities, name), name


def test_float8_that_a_device_does_not_convert_is_not_claimed(monkeypatch):
    monkeypatch.setitem(trials.TRIALS, "float8", lambda platform: "converted to float8_e4m3fn, 0.3 gave 0.0")
    assert "0.3 gave 0.0" in opened().capabilities.float8.reason


def once(graph, replay):
    """From the second replay on, a graph does nothing."""
    graph.num_replays = getattr(graph, "num_replays", 0) + 1
    if graph.num_replays == 1:
        replay(graph)


def first_of_its_pool(graph, replay):
    """A further graph of a pool does nothing."""
    if not any(other is not graph and other.pool() == graph.pool() for other in executables):
        replay(graph)


def same_numbers(graph, replay):
    """Every replay draws the same numbers."""
    torch.manual_seed(0)
    replay(graph)


def short(graph, replay):
    """A graph of 64 ops or more does nothing."""
    if graph._graph.num_tasks < 64:
        replay(graph)


@pytest.mark.parametrize(
    ("wrong", "capability", "told"),
    [
        (once, "graphs", "replayed with x = 5.0, gave 1.0"),
        (first_of_its_pool, "shared_pool", "the second gave a wrong result"),
        (same_numbers, "random_in_graph", "the same numbers"),
        (short, "merged_loop", "step 0 of replay 0"),
    ],
)
def test_a_drifted_claim_is_withdrawn_with_what_was_seen(wrong, capability, told, monkeypatch):
    replay = MUSAGraph.replay
    monkeypatch.setattr(MUSAGraph, "replay", lambda graph: wrong(graph, replay))
    capabilities = opened().capabilities
    support = getattr(capabilities, capability)
    assert not support
    assert "a trial on this device failed" in support.reason
    assert told in support.reason
    if capability == "graphs":  # nothing that needs them is claimed
        assert not any(getattr(capabilities, name) for name in CLAIMED)
        assert resolve("auto", capabilities, ()).lowering == "eager"


def test_a_device_that_can_t_capture_opens_for_eager_work():
    simulated.machine.max_live_graphs = 0
    capabilities = opened().capabilities
    assert "illegal memory access" in capabilities.graphs.reason
    assert resolve("auto", capabilities, ()).lowering == "eager"


def test_trials_leave_no_graph_no_memory_and_no_other_random_numbers_behind(musa):
    before, numbers = (live(musa), reserved(musa)), musa.musa.get_rng_state(0)
    opened()
    assert (live(musa), reserved(musa)) == before
    assert numbers.equal(musa.musa.get_rng_state(0))


def test_what_was_found_apart_is_kept_per_device_and_version(apart, monkeypatch):
    started, file = apart
    first = opened()
    assert started == [["0", *trials.TRIALS]]
    assert opened().capabilities == first.capabilities
    assert first.release == "by_own_call"
    assert len(started) == 1
    monkeypatch.setattr("torch_musa.__version__", "2.99.0")
    opened()
    assert len(started) == 2
    assert len(json.loads(file.read_text())) == 2
    monkeypatch.setenv(VARIABLE, "again")
    opened()
    assert len(started) == 3
    assert file.parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_device_that_opens_in_no_other_process_says_how_to_go_on(apart, monkeypatch):
    monkeypatch.setattr(trial_process.sys, "executable", "/bin/false" if sys.platform != "win32" else "false")
    with pytest.raises(PlatformError, match=f"ended with exit status 1.*{VARIABLE}=skip"):
        opened()


def test_a_value_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "never")
    with pytest.raises(ConfigError, match="skip or again"):
        opened()


def test_a_platform_for_trials_claims_nothing():
    platform = MusaPlatform(0, Policy(), found={})
    with pytest.raises(PlatformError, match="for trials only"):
        _ = platform.capabilities

"""A capability whose trial fails on the device is not claimed; a trial that ends its process harms nobody."""

from __future__ import annotations

import json
import sys

import pytest
from device_memory import live, reserved
from specgraph.capture import resolve
from specgraph.device import trial, trial_process
from specgraph.errors import ConfigError, PlatformError

from specgraph_musa import trials
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa import simulated

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


@pytest.mark.parametrize(
    ("defect", "capability", "told"),
    [
        ("replays_once", "graphs", "replayed with x = 5.0, gave 1.0"),
        ("pool_overlaps", "shared_pool", "the second gave a wrong result"),
        ("random_baked", "random_in_graph", "the same numbers"),
        ("loop_stops_short", "merged_loop", "step 0 of replay 0"),
    ],
)
def test_a_drifted_claim_is_withdrawn_with_what_was_seen(defect, capability, told):
    setattr(simulated.defects, defect, True)
    support = getattr(opened().capabilities, capability)
    assert not support
    assert "a trial on this device failed" in support.reason
    assert told in support.reason


def test_without_graphs_nothing_that_needs_them_is_claimed():
    simulated.defects.replays_once = True
    capabilities = opened().capabilities
    assert not any(getattr(capabilities, name) for name in CLAIMED)
    assert resolve("auto", capabilities, ()).lowering == "eager"


def test_a_device_that_can_t_capture_opens_for_eager_work():
    simulated.defects.max_live_graphs = 0
    capabilities = opened().capabilities
    assert "the runtime holds no more graphs" in capabilities.graphs.reason
    assert resolve("auto", capabilities, ()).lowering == "eager"


def test_trials_leave_the_generator_where_it_was(musa):
    before = musa.musa.get_rng_state(0)
    opened()
    assert before.equal(musa.musa.get_rng_state(0))


def test_trials_leave_no_graph_and_no_memory_behind(musa):
    before = live(musa), reserved(musa)
    opened()
    assert (live(musa), reserved(musa)) == before


def test_a_trial_that_raises_is_a_trial_that_failed(musa):
    def broken(platform) -> None:
        raise RuntimeError("device lost\nlong story")

    assert trial.outcome(musa, broken) == "RuntimeError: device lost"


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


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": {"graphs": 3}}'])
def test_a_broken_cache_file_is_no_cache(apart, content):
    started, file = apart
    file.parent.mkdir()
    file.write_text(content)
    assert trial_process.read(file) == {}
    trial_process.keep(file, "key", {"graphs": ""})
    assert trial_process.read(file) == {"key": {"graphs": ""}}
    assert started == []


def test_another_user_s_cache_file_is_not_read(apart, monkeypatch):
    _, file = apart
    trial_process.keep(file, "key", {"graphs": ""})
    monkeypatch.setattr(trial_process.os, "getuid", lambda: -1)
    assert trial_process.read(file) == {}


def test_a_cache_folder_that_can_t_be_written_costs_the_memory_only(apart, caplog):
    _, file = apart
    file.parent.write_text("a file where the folder should be")
    trial_process.keep(file, "key", {"graphs": ""})
    assert "is not kept" in caplog.text
    assert trial_process.read(file) == {}


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

"""The platform that opens: the one asked for, the one accelerator that answers, or the CPU."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specgraph.device import ENV_VAR, discover, open_platform, selection
from specgraph.errors import PlatformError


@pytest.fixture
def found(plugins):
    cpu = discover()["cpu"]  # before a plugin takes the name of a backend that is installed here

    def make(*backends):
        for kwargs in backends:
            plugins.install_backend(f"plugin-{kwargs['name']}", **kwargs)
        return {"cpu": cpu, **discover(plugins.entries())}

    return make


FAST = {"name": "fast"}
SLOW = {"name": "slow"}
ABSENT = {"name": "absent", "available": False, "devices": 0}


def test_asked_for_by_argument(found):
    platform = open_platform("fast:1", found=found(FAST, SLOW), environ={ENV_VAR: "slow"})
    assert platform.opened == ("fast", 1)


def test_asked_for_by_variable(found):
    assert open_platform(found=found(FAST, SLOW), environ={ENV_VAR: "slow"}).opened == ("slow", 0)
    assert open_platform(found=found(), environ={ENV_VAR: "cpu"}).info.name == "cpu"


def test_an_empty_variable_asks_for_nothing(found):
    assert open_platform(found=found(FAST), environ={ENV_VAR: ""}).opened == ("fast", 0)


def test_the_one_accelerator_that_answers(found):
    assert open_platform(found=found(FAST, ABSENT), environ={}).opened == ("fast", 0)


def test_a_simulator_is_never_chosen_by_itself(found):
    simulator = {"name": "simulator", "accelerator": False}
    backends = found(simulator)
    assert open_platform(found=backends, environ={}).info.name == "cpu"
    assert open_platform("simulator", found=backends, environ={}).opened == ("simulator", 0)


def test_the_cpu_when_nothing_answers(found, caplog):
    with caplog.at_level(logging.INFO):
        platform = open_platform(found=found(ABSENT), environ={})
    assert platform.info.name == "cpu"
    assert len(caplog.messages) == 1
    assert "no accelerator is available" in caplog.text


@pytest.mark.parametrize(
    ("device", "level", "message"),
    [
        ("cuda", "WARNING", "although torch sees a device 'cuda'.*pip install .* -e ./backends/cuda"),
        ("absent", "WARNING", "although torch sees a device 'absent'.*no driver: install one"),
        ("xpu", "WARNING", "although torch sees a device 'xpu'.*pip install .* -e ./backends/accelerator"),
        ("mps", "INFO", "no accelerator is available"),
    ],
)
def test_an_accelerator_of_torch_that_is_not_used_is_told(found, caplog, monkeypatch, device, level, message):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type=device))
    with caplog.at_level(logging.INFO):
        assert open_platform(found=found(ABSENT), environ={}).info.name == "cpu"
    assert [record.levelname for record in caplog.records] == [level]
    assert re.search(message, caplog.text, re.DOTALL)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ((), "sees a device 'xpu'.*No installed backend is for it"),
        (({**ABSENT, "name": "accelerator"},), "The backend 'accelerator' is not available: no driver: install one"),
    ],
)
def test_an_accelerator_of_torch_without_a_checkout(found, caplog, monkeypatch, tmp_path, installed, message):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type="xpu"))
    monkeypatch.setattr(selection, "CHECKOUT", tmp_path)
    assert open_platform(found=found(*installed), environ={}).info.name == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(message, caplog.text, re.DOTALL)


def test_a_backend_of_this_checkout_that_is_not_installed(found):
    with pytest.raises(
        PlatformError, match=r"pip install -e \. -e \./models -e \./run -e \./conformance -e \./backends/cuda$"
    ):
        open_platform("cuda", found=found(ABSENT), environ={})


def test_several_accelerators(found):
    with pytest.raises(PlatformError, match=r"fast, slow.*SPECGRAPH_PLATFORM=fast"):
        open_platform(found=found(FAST, SLOW), environ={})


@pytest.mark.parametrize("asked", ["fats", "fats:0", "CPU"])
def test_unknown(found, asked):
    with pytest.raises(PlatformError) as raised:
        open_platform(asked, found=found(FAST, ABSENT), environ={})
    message = str(raised.value)
    assert f"unknown platform '{asked.partition(':')[0]}'" in message
    assert "cpu (specgraph-core" in message
    assert "fast (plugin-fast 1.0): available" in message
    assert "absent (plugin-absent 1.0): not available: no driver: install one" in message


def test_not_available(found):
    with pytest.raises(PlatformError, match=r"'absent' is not available: no driver: install one\nInstalled platforms"):
        open_platform("absent", found=found(ABSENT), environ={})


@pytest.mark.parametrize("asked", ["fast:x", "fast:-1", "fast:1.5", "fast:0:1"])
def test_malformed_index(found, asked):
    with pytest.raises(PlatformError, match="device index"):
        open_platform(asked, found=found(FAST), environ={})


def test_index_out_of_range(found):
    with pytest.raises(PlatformError, match=r"2 device\(s\), index 2"):
        open_platform("fast:2", found=found(FAST), environ={})
    with pytest.raises(PlatformError, match=r"1 device\(s\), index 1"):
        open_platform("cpu:1", found=found(), environ={})


@pytest.mark.parametrize(
    ("asked", "supersedes", "available", "opened"),
    [
        (None, {"imitated"}, True, "real"),
        ("imitated", {"imitated"}, True, "imitated"),
        (None, {"imitated"}, False, "imitated"),
        (None, {"absent"}, True, None),
    ],
    ids=["passed over where both answer", "by name", "by one that does not answer", "two of no relation"],
)
def test_a_device_seen_through_two_vendors_interfaces_is_one_accelerator(found, asked, supersedes, available, opened):
    backends = found({"name": "imitated"}, {"name": "real", "available": available})
    real = backends["real"]
    backends["real"] = replace(real, backend=replace(real.backend, supersedes=frozenset(supersedes)))
    if opened is None:
        with pytest.raises(PlatformError, match="several accelerators are available: imitated, real"):
            open_platform(asked, found=backends, environ={})
    else:
        assert open_platform(asked, found=backends, environ={}).opened == (opened, 0)

"""The distribution: entry point, probe, imports, names and capabilities."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points

import pytest
import torch
from specgraph.attention import AttentionBackend
from specgraph.capture import resolve
from specgraph.device import PLATFORM_API, Discovered, Event, Platform, Probe, Stream, discover, open_platform
from specgraph.device.discovery import ENTRY_POINT_GROUP
from specgraph.errors import PlatformError

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_refusal

IMPORTS = """
import sys, importlib, importlib.abc
import torch, specgraph.device
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in {known!r} or top in sys.modules:
            return None
        raise ImportError(f"it imports {{name}}")
sys.meta_path.insert(0, Refuse())
importlib.import_module({module!r})
"""


@case(
    "discovery.found-by-entry-point",
    "The distribution's entry point loads and gives the platform its name.",
    cause="the entry point in the group specgraph.backends, or an exception while its module is imported",
    quick=True,
)
def test_found(backend: Discovered, platform: Platform) -> None:
    item = discover()[backend.name]
    assert item.backend is not None, item.reason
    assert item.backend.name == platform.info.name == backend.name


@case(
    "discovery.api-number",
    "The backend is built for this platform API.",
    cause="Backend(api=..., oldest_api=...) names numbers without specgraph.device.PLATFORM_API",
    quick=True,
)
def test_api(backend: Discovered) -> None:
    assert backend.backend is not None
    newest, oldest = backend.backend.api, backend.backend.oldest_api
    assert (newest if oldest is None else oldest) <= PLATFORM_API <= newest


@case(
    "discovery.probe-repeats",
    "The probe answers the same each time, with at least one device, and raises nothing.",
    cause="Backend.probe keeps state, or opens the device in a way that a second call trips over",
    quick=True,
)
def test_probe(backend: Discovered) -> None:
    assert backend.backend is not None
    first, second = backend.backend.probe(), backend.backend.probe()
    assert first == second
    assert first.available
    assert first.device_count >= 1
    assert first.versions


@case(
    "discovery.imports-without-vendor",
    "The entry point's module imports on a machine that has nothing but specgraph and torch.",
    cause="a vendor package imported at module level; import it in Backend.probe and Backend.open",
)
def test_import(backend: Discovered) -> None:
    entry = next(e for e in entry_points(group=ENTRY_POINT_GROUP) if e.name == backend.name)
    own = entry.module.partition(".")[0]
    code = IMPORTS.format(module=entry.module, known={own, "specgraph"})
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


@case(
    "discovery.opened-by-name-and-index",
    "`name:i` opens device i for each device, and an index that doesn't exist is a PlatformError.",
    hazard="open-ignores-index",
    cause="Backend.open ignores its index, or Probe.device_count is wrong",
    quick=True,
)
def test_open(backend: Discovered) -> None:
    count = backend.probe().device_count
    found = {backend.name: backend}
    for index in range(count):
        opened = open_platform(f"{backend.name}:{index}", found=found)
        assert opened.info.name == backend.name
        if count > 1:
            assert opened.device.index == index, f"{backend.name}:{index} opened {opened.device}"
        opened.close()
    with pytest.raises(PlatformError):
        open_platform(f"{backend.name}:{count}", found=found)


@case(
    "discovery.probe-is-asked-each-time",
    "Opening a platform asks the backend's probe anew: a device that has gone away is a PlatformError with the reason.",
    hazard="probe-cached",
    cause="the probe's first answer is kept for the life of the process",
    quick=True,
)
def test_probe_again(backend: Discovered) -> None:
    assert backend.backend is not None
    real, answers = backend.backend.probe, [backend.probe(), Probe(available=False, reason="it was unplugged")]
    gone = replace(backend, backend=replace(backend.backend, probe=lambda: answers.pop(0) if answers else real()))
    assert gone.probe().available
    what = "opening a platform whose device has gone away since the first probe"
    expect_refusal(lambda: open_platform(backend.name, found={backend.name: gone}), what, "unplugged", (PlatformError,))


@case(
    "discovery.failing-probe-is-a-reason",
    "A backend whose probe raises is unavailable with the exception as the reason, and hides no other backend.",
    hazard="failing-probe",
    cause="Discovered.probe lets an exception out, or the list of backends leaves some out",
    quick=True,
)
def test_failing_probe(backend: Discovered) -> None:
    assert backend.backend is not None

    def probe() -> Probe:
        raise OSError("libacme.so: cannot open shared object file")

    broken = replace(backend, name="broken", distribution="acme", backend=replace(backend.backend, probe=probe))
    answer = broken.probe()
    assert not answer.available
    assert answer.device_count == 0
    assert "libacme.so" in answer.reason
    found = {"broken": broken, backend.name: backend}
    with pytest.raises(PlatformError, match=r"not available: .*libacme\.so") as caught:
        open_platform("broken", found=found)
    for line in (f"broken (acme {broken.version}): not available", f"{backend.name} ({backend.distribution}"):
        assert line in str(caught.value), f"the error does not list '{line}'"
    open_platform(backend.name, found=found).close()


@case(
    "discovery.chosen-by-itself",
    "Without a name the environment variable is asked, then the one accelerator that is available is opened; two of "
    "them are an error that names both.",
    hazard="failing-probe",
    cause="Backend.accelerator, or a selection that prefers one accelerator over another without a word",
    quick=True,
)
def test_chosen(backend: Discovered) -> None:
    assert backend.backend is not None
    one = {backend.name: replace(backend, backend=replace(backend.backend, accelerator=True))}
    for environ in ({}, {"SPECGRAPH_PLATFORM": f"{backend.name}:0"}):
        opened = open_platform(found=one, environ=environ)
        assert opened.info.name == backend.name
        opened.close()
    two = {**one, "other": replace(one[backend.name], name="other")}
    with pytest.raises(PlatformError, match=f"{backend.name}, other"):
        open_platform(found=two, environ={})
    with pytest.raises(PlatformError, match="missing"):
        open_platform(found=one, environ={"SPECGRAPH_PLATFORM": "missing"})


@case(
    "discovery.device-is-named",
    "info has a torch device that tensors go to, the device's own name, the kind of device it is, and torch's version.",
    cause="PlatformInfo",
    quick=True,
)
def test_info(platform: Platform) -> None:
    info = platform.info
    assert isinstance(info.device, torch.device)
    assert torch.zeros(2, device=info.device).device == info.device, "name the device with its index"
    assert info.device_name
    assert info.device_kind, "PlatformInfo.device_kind is empty: name the hardware, or what simulates it"
    assert info.versions.get("torch") == torch.__version__


@case(
    "discovery.capabilities-have-reasons",
    "Each capability that is absent or conditional says why, in words that a user can act on.",
    cause="a reason in Capabilities that is empty or too short to act on",
    quick=True,
)
def test_reasons(platform: Platform) -> None:
    supports = platform.capabilities.supports()
    short = {name: s.reason for name, s in supports.items() if s.level != "yes" and len(s.reason) < 10}
    assert not short, f"reasons of less than 10 characters: {short}"


@case(
    "discovery.handles-have-torchs-verbs",
    "Streams and events have the methods of torch.Stream and torch.Event.",
    cause="a handle class that misses a method of specgraph.device.Stream or Event",
    quick=True,
)
def test_verbs(platform: Platform) -> None:
    assert isinstance(platform.stream(), Stream)
    assert isinstance(platform.current_stream(), Stream)
    assert isinstance(platform.event(), Event)


@case(
    "discovery.default-lowering-is-possible",
    "`auto` resolves to the platform's default lowering with the core's attention.",
    cause="Capabilities.default_lowering names one that its own capabilities refuse",
    quick=True,
)
def test_default_lowering(platform: Platform) -> None:
    resolution = resolve("auto", platform.capabilities, ())
    assert resolution.lowering == platform.capabilities.default_lowering, resolution.explain()


@case(
    "discovery.attention-by-name",
    "Each attention backend of the device's own can be built and says what it takes from the host.",
    cause="Platform.attention_backends",
    quick=True,
)
def test_attention(platform: Platform) -> None:
    for name, factory in platform.attention_backends().items():
        made: AttentionBackend = factory(platform)
        assert made.name == name
        assert isinstance(made.host_parameters, tuple)
        assert callable(made.forward)

"""The probe: whether torch_musa is installed, fits torch, has the calls that this package needs, and sees a device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from specgraph.device import Probe
from specgraph.device.installed import calls_of, installed_version, missing_names
from specgraph.errors import first_line

HOW_TO_INSTALL = (
    "install the MUSA driver and toolkit, then torch and torch_musa of one release, both from Moore Threads "
    "(https://github.com/MooreThreads/torch_musa). They are not on PyPI, and the vendor's index reuses the names "
    "'torch' and 'triton': give pip that index alone (--index-url), never merged with PyPI's (--extra-index-url), or "
    "it may mix the two"
)

CALLS = calls_of(
    """
    Event(enable_timing=) Event.elapsed_time(self,event) Event.query(self) Event.record(self,stream)
    Event.synchronize(self) Event.wait(self,stream) MUSAGraph() MUSAGraph.capture_begin(self,pool,capture_error_mode=)
    MUSAGraph.capture_end(self) MUSAGraph.get_latest_instance() MUSAGraph.pool(self) MUSAGraph.replay(self)
    MUSAGraph.reset(self) Stream(device) Stream.device_index Stream.device_type Stream.query(self)
    Stream.record_event(self,event) Stream.stream_id Stream.synchronize(self) Stream.wait_event(self,event)
    Stream.wait_stream(self,stream)
    current_stream(device) device(device) device_count() empty_cache() get_device_properties(device)
    get_rng_state(device) graph_pool_handle() is_available() is_current_stream_capturing() mem_get_info(device)
    memory_allocated(device) memory_reserved(device) set_rng_state(state,device) stream(stream) synchronize(device)
"""
)
"""The calls of this package to `torch.musa`, by their names below it. `backends/musa/api/` records these calls of
2.7.1 and 2.11.0.post2."""


def left_out_by_vllm(environ: Mapping[str, str] = os.environ) -> str:
    """Return a remark if vllm-musa and the plugin of vLLM are installed, and VLLM_PLUGINS leaves the plugin out."""
    named = environ.get("VLLM_PLUGINS")
    has_engine, has_plugin = (
        name in entry_points(group=f"vllm.{group}").names
        for group, name in (("platform_plugins", "musa"), ("general_plugins", "specgraph"))
    )
    if named is None or "specgraph" in named.split(",") or not (has_engine and has_plugin):
        return ""
    return f"VLLM_PLUGINS={named} leaves out specgraph's plugin of vLLM: set VLLM_PLUGINS={named},specgraph"


def probe(
    load: Callable[[str], Any] = import_module,
    torch_version: str = torch.__version__,
    installed: Callable[[str], str] = installed_version,
) -> Probe:
    """Say whether this machine has a usable MUSA device. Runs nothing on a device and never raises.

    torch_musa is imported only if its version fits torch's: loading another binary could end the process.

    Args:
        load: imports a module by name.
        torch_version: the version of torch.
        installed: returns the version of an installed distribution, or "".
    """
    versions = {"torch": torch_version}

    def refuse(reason: str) -> Probe:
        return Probe(available=False, reason=reason, versions=versions)

    def misfit() -> str:
        if _release(versions["torch_musa"]) in (_release(torch_version), ()):
            return ""
        return (
            f"torch_musa {versions['torch_musa']} does not fit torch {torch_version}: its binary is built for the "
            "torch of its own release. Install torch and torch_musa of one release from Moore Threads"
        )

    if _release(torch_version) < (2, 7):
        return refuse(f"torch {torch_version} is older than 2.7, which specgraph needs: {HOW_TO_INSTALL}")
    if found := installed("torch_musa"):
        versions["torch_musa"] = found
        if wrong := misfit():
            return refuse(wrong)
    try:
        musa = load("torch_musa")
    except ModuleNotFoundError as error:
        needs = "" if error.name == "torch_musa" else f"needs the module '{error.name}', which "
        return refuse(f"torch_musa {needs}is {'missing' if needs else 'not installed'}: {HOW_TO_INSTALL}")
    except Exception as error:
        return refuse(_why_it_does_not_load(error, torch_version))
    versions["torch_musa"] = str(getattr(musa, "__version__", "unknown"))
    if wrong := misfit():
        return refuse(wrong)
    if missing := missing_names(musa, CALLS):
        return refuse(
            f"torch_musa {versions['torch_musa']} lacks what this backend calls: {', '.join(missing)}. It was written "
            "against torch_musa 2.7.1, 2.9.1 and 2.11: install one of them, or a newer specgraph-musa"
        )
    try:
        count = int(musa.device_count()) if musa.is_available() else 0
    except Exception as error:
        return refuse(f"torch_musa is installed, and its runtime fails: {first_line(error)}. Check musaInfo")
    if count == 0:
        return refuse("torch_musa sees no device: check the driver (musaInfo, /dev/mtgpu*) and MUSA_VISIBLE_DEVICES")
    return Probe(available=True, reason=left_out_by_vllm(), device_count=count, versions=versions)


def _why_it_does_not_load(error: BaseException, torch_version: str) -> str:
    """Return why torch_musa can't be imported. It replaces the dynamic loader's message by advice of its own, so the
    message is taken from the error's causes."""
    causes: list[BaseException] = [error]
    while len(causes) < 4 and (cause := causes[-1].__cause__ or causes[-1].__context__):
        causes.append(cause)
    text = "; ".join(dict.fromkeys(map(first_line, causes)))
    if "undefined symbol" in text:
        return (
            f"torch_musa does not load into torch {torch_version} ({text}): it needs the torch that Moore Threads "
            f"patches and builds with it, and another one is installed. {HOW_TO_INSTALL[0].upper()}{HOW_TO_INSTALL[1:]}"
        )
    if "cannot open shared object file" in text:
        return (
            f"torch_musa does not load ({text}): a library of the MUSA toolkit is not found. Install the toolkit, and "
            "put its lib folder (/usr/local/musa/lib) on LD_LIBRARY_PATH"
        )
    return f"torch_musa does not load: {text}"


def _release(text: str) -> tuple[int, ...]:
    """Return (major, minor), or () if the text has none."""
    return tuple(map(int, match.groups())) if (match := re.match(r"(\d+)\.(\d+)", text)) else ()

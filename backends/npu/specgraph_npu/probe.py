"""The Ascend software of this machine, advice on missing parts, and the capabilities of an opened NPU.

The checks go from cheap to expensive and stop at the first one that fails. torch_npu is imported only if its libraries
can load. Without CANN its import fails with an unclear error, and with autoload on, `import torch` fails too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from specgraph.device import Capabilities, Probe, no, quirk, trial, yes
from specgraph.device.installed import installed_version
from specgraph.errors import first_line

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform

KNOWN_WHEELS = ("2.13.0", "2.10.0.post4", "2.12.0.post3", "2.14.0")
"""The torch_npu versions that this backend's calls were checked against, each with the torch of its number. The first
is the one to install if nothing else decides."""


def probe() -> Probe:
    """Say whether an NPU can be opened here. Never raises."""
    if reason := missing():
        return Probe(available=False, reason=reason)
    try:
        torch_npu = importlib.import_module("torch_npu")
        if count := torch.npu.device_count():  # type: ignore[attr-defined]
            return Probe(available=True, device_count=count, versions=versions(torch_npu))
        reason = "torch_npu and CANN are here, but no NPU: check `npu-smi info`"
    except Exception as error:
        reason = f"torch_npu is installed but does not work: {type(error).__name__}: {first_line(error)}"
    return Probe(available=False, reason=reason)


def missing(environ: Mapping[str, str] = os.environ) -> str:
    """Return the reason why this backend can't work and the remedy, or an empty string."""
    wheel, torch_version = installed_version("torch_npu"), installed_version("torch").partition("+")[0]
    release = torch_version.split(".")[:2]
    if not wheel or importlib.util.find_spec("torch_npu") is None:
        fitting = (known for known in KNOWN_WHEELS if known.split(".")[:2] == release)
        found = next(fitting, f"{KNOWN_WHEELS[0]} (with torch=={KNOWN_WHEELS[0]})")
        return f"torch_npu is not installed: pip install torch_npu=={found}"
    if release != wheel.split(".")[:2]:
        needs = ".".join(wheel.split(".")[:3])
        return f"torch_npu {wheel} needs torch {needs}, installed is torch {torch_version}: pip install torch=={needs}"
    if not library("libascendcl.so"):
        return (
            "torch_npu is installed but CANN's libascendcl.so is missing or not on the library path: install the CANN "
            "toolkit and run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`"
        )
    if environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        return (
            "ASCEND_LAUNCH_BLOCKING=1 makes every replay wait for the graph, and the graph waits for the update that "
            "follows the replay: it would hang. Unset ASCEND_LAUNCH_BLOCKING"
        )
    return ""


def library(name: str) -> ctypes.CDLL | None:
    """Load a library. None if the dynamic linker does not find it or one of its dependencies."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)


def has_value_wait() -> bool:
    """Return whether a stream can wait for a value in device memory. torch_npu's `ExternalEvent` depends on it."""
    return all(hasattr(library("libascendcl.so"), name) for name in ("aclrtValueWait", "aclrtValueWrite"))


def is_simulated() -> bool:
    """Return whether the runtime is this project's simulator for tests (`simulator/`), without an NPU."""
    return hasattr(library("libascendcl.so"), "ascendsim_report")


def versions(torch_npu: Any) -> dict[str, str]:
    """Return the versions of torch, torch_npu and CANN."""
    cann = ""
    with contextlib.suppress(Exception):
        cann = torch_npu.npu.utils.get_cann_version()
    if cann and is_simulated():
        cann = f"none, simulated as {cann}"
    return {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "cann": cann or "unknown"}


def reason_of(error: Exception) -> str:
    """Return the runtime's own message from torch_npu's error text. If there is none, return the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("[simulated", "EZ", "EE", "The "))]
    return (telling or lines or [type(error).__name__])[0]


_TASK_NAMES = tuple(f"graph_task_{name}" for name in ("group_begin", "group_end", "update_begin", "update_end"))


def find_capabilities(platform: NpuPlatform) -> Capabilities:
    """Return the capabilities: graphs, pools and loops from trials on the device, the rest from the installed names."""
    from specgraph_npu.kv_cache import use_fused_write

    graphs = trial.claim(platform, trial.replays_follow_their_input)
    waits = "torch_npu takes one wait for each record that is issued; a record captured in a graph is issued once"
    if not platform.waits_for_values:
        waits = "the runtime has no aclrtValueWait: an event must be recorded once before it is captured"
    events = quirk(f"{waits}; the host can neither query, time nor wait for an external event")
    updates = yes("for kernels of cube and vector cores, attention among them; only core types are compared")
    if lacking := [name for name in ("ExternalEvent", *_TASK_NAMES) if not hasattr(platform.npu, name)]:
        events = updates = no(f"torch_npu lacks {', '.join(lacking)}")
    return Capabilities(
        graphs=graphs,
        shared_pool=graphs and trial.claim(platform, trial.graphs_share_a_pool),
        external_events=events,
        task_update=graphs and updates,
        float8=no("CANN's documents list no e4m3 for aclnnInplaceCopy, with which torch_npu copies"),
        merged_loop=graphs and trial.claim(platform, trial.a_loop_in_one_graph),
        collectives_in_graph=no("not tried: no test of this backend captures HCCL ops"),
        random_in_graph=quirk("torch_npu registers its default generator; specgraph's draft ops use none"),
        host_read_detection=yes("the runtime refuses to wait for a stream that is being captured"),
        order_detection=no("the runtime does not report unordered access"),
        notes={
            "triton": yes() if installed_version("triton-ascend") else no("triton-ascend is not installed"),
            "fused KV write": use_fused_write(platform),
        },
        update_order="during_replay",
        default_lowering="merged",
    )

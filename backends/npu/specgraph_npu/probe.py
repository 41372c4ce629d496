"""What this machine has of an Ascend software stack, what to do about what is missing, and what an opened NPU can do.

The checks go from cheap to expensive and stop at the first that fails. torch_npu is imported only when its libraries
can load: without CANN that import fails deep inside, and with autoload on `import torch` fails with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from specgraph.errors import first_line
from specgraph.platforms import Capabilities, Probe, Support, no, quirk, yes
from specgraph.platforms.trial import a_loop_in_one_graph, claim, graphs_share_a_pool, replays_follow_their_input

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform

KNOWN_WHEELS = ("2.12.0.post3", "2.13.0", "2.14.0")
"""torch_npu versions whose names and keywords this backend was checked against, with the torch of the same number."""


def probe() -> Probe:
    """Whether an NPU can be opened here; never raises."""
    if reason := missing():
        return Probe(available=False, reason=reason)
    try:
        torch_npu = importlib.import_module("torch_npu")
        import torch

        count = torch.npu.device_count()  # type: ignore[attr-defined]
    except Exception as error:
        reason = f"torch_npu is installed but does not work: {type(error).__name__}: {first_line(error)}"
        return Probe(available=False, reason=reason)
    if count == 0:
        return Probe(available=False, reason="torch_npu and CANN are here, but no NPU: check `npu-smi info`")
    return Probe(available=True, device_count=count, versions=versions(torch_npu))


def missing(environ: Mapping[str, str] | None = None) -> str:
    """What keeps this backend from working, with what to do, or an empty string."""
    environ = os.environ if environ is None else environ
    wheel = _version("torch_npu")
    if not wheel or importlib.util.find_spec("torch_npu") is None:
        return f"torch_npu is not installed: pip install torch_npu=={_wheel_for(version('torch'))}"
    torch_version, number = version("torch").partition("+")[0], wheel.split(".")[:3]
    if torch_version.split(".")[:2] != number[:2]:
        needed = ".".join(number)
        return (
            f"torch_npu {wheel} needs torch {needed}, installed is torch {torch_version}: pip install torch=={needed}"
        )
    if not library_loads("libascendcl.so"):
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


def library_loads(name: str) -> bool:
    """Whether the dynamic linker finds a library and all that it needs."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def has_value_wait() -> bool:
    """Whether a stream can wait for a value in device memory: decides how torch_npu builds events (`Gates`)."""
    runtime = ctypes.CDLL("libascendcl.so")
    return hasattr(runtime, "aclrtValueWait") and hasattr(runtime, "aclrtValueWrite")


def is_simulated() -> bool:
    """Whether the runtime is this project's simulation for tests (`simulator/`) and no NPU is behind it."""
    return hasattr(ctypes.CDLL("libascendcl.so"), "ascendsim_report")


def versions(torch_npu: Any) -> dict[str, str]:
    """torch, torch_npu and CANN."""
    import torch

    cann = ""
    with contextlib.suppress(Exception):
        cann = torch_npu.npu.utils.get_cann_version()
    if cann and is_simulated():
        cann = f"none, simulated as {cann}"
    return {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "cann": cann or "unknown"}


def _wheel_for(torch_version: str) -> str:
    fitting = (wheel for wheel in KNOWN_WHEELS if wheel.split(".")[:2] == torch_version.split(".")[:2])
    return next(fitting, f"{KNOWN_WHEELS[1]} (with torch=={KNOWN_WHEELS[1]})")


def reason_of(error: Exception) -> str:
    """The runtime's own sentence out of torch_npu's report, or its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("[simulated", "EZ", "EE", "The "))]
    return (telling or lines or [type(error).__name__])[0]


# ---- what an opened NPU can do -------------------------------------------------------------------------------------

_TASK_NAMES = ("graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end")
_EVENTS = {
    True: "torch_npu takes one wait for each record that is issued, and a record captured in a graph is issued once; "
    "the host can neither query, time nor wait for an external event",
    False: "the runtime has no aclrtValueWait: an event must be recorded once before it is captured, and the host can "
    "neither query, time nor wait for it",
}
"""What limits external events, by `has_value_wait`."""


def find_capabilities(platform: NpuPlatform) -> Capabilities:
    """Graphs, pools and loops from trials on the device, the rest from the names that are installed."""
    graphs = claim(platform, replays_follow_their_input)
    has_events = hasattr(platform.npu, "ExternalEvent")
    events = quirk(_EVENTS[has_value_wait()]) if has_events else no("torch_npu has no ExternalEvent")
    updates = yes("for kernels of cube and vector cores, attention among them; only core types are compared")
    if lacking := [name for name in _TASK_NAMES if not hasattr(platform.npu, name)]:
        updates = no(f"torch_npu lacks {', '.join(lacking)}")
    elif not events:
        updates = events
    return Capabilities(
        graphs=graphs,
        shared_pool=claim(platform, graphs_share_a_pool) if graphs else graphs,
        external_events=events,
        task_update=updates if graphs else graphs,
        merged_loop=claim(platform, a_loop_in_one_graph) if graphs else graphs,
        collectives_in_graph=no("not tried: no test of this backend captures HCCL ops"),
        random_in_graph=quirk("torch_npu registers its default generator; specgraph's draft ops use none"),
        host_read_detection=yes("the runtime refuses to wait for a stream that is being captured"),
        order_detection=no("the runtime does not report unordered access"),
        notes={"triton": yes() if _version("triton-ascend") else no("triton-ascend is not installed")},
        update_order="during_replay",
        default_lowering="merged",
    )


def has_atb() -> Support:
    """Whether the ATB library is there, which `_npu_paged_attention` needs."""
    hint = "libatb.so is missing: install the CANN NNAL package and source its set_env.sh"
    return yes() if library_loads("libatb.so") else no(hint)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

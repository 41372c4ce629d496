"""The capabilities of one GPU: tried on it if that takes milliseconds; a reason says what the others rest on."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specgraph.device import Capabilities, Support, no, quirk, trial, yes
from specgraph.device.installed import installed_version
from specgraph.errors import first_line

if TYPE_CHECKING:
    from specgraph_cuda.graph import Launcher
    from specgraph_cuda.platform import CudaPlatform


def capabilities(platform: CudaPlatform) -> Capabilities:
    """Return the capabilities of one GPU. A reason says "not tried here" if they rest on torch's documents."""
    graphs = trial.claim(platform, trial.replays_follow_their_input)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Capabilities(
        graphs=graphs,
        merged_loop=graphs and trial.claim(platform, trial.a_loop_in_one_graph),
        task_update=graphs and task_update_support(platform),
        shared_pool=graphs and trial.claim(platform, trial.graphs_share_a_pool, "capture the largest graph first"),
        external_events=yes("events of torch.cuda have an external form; not tried here"),
        collectives_in_graph=quirk("NCCL can be captured; not tried here") if nccl else no("this torch has no NCCL"),
        random_in_graph=quirk("the default generator, and generators registered with the graph; not tried here"),
        host_read_detection=quirk(
            "synchronising reads are refused, a non_blocking copy to pinned memory is captured; not tried here"
        ),
        order_detection=no("use compute-sanitizer's racecheck, or run on the cpu platform"),
        notes={"triton": triton_support(platform.device)},
    )


TASK_UPDATE = "specgraph_cuda.task_update"
"""The optional module of task updates. Its `enable` tries them on a platform."""


def task_update_support(platform: CudaPlatform) -> Support:
    """Turn task updates on if their module is installed and they work on this GPU."""
    try:
        module = import_module(TASK_UPDATE)
    except ImportError as error:
        if error.name == TASK_UPDATE:
            return no(f"this installation of specgraph-cuda is without {TASK_UPDATE}: install the whole one")
        return no(f"cuda.bindings is missing: pip install cuda-bindings ({first_line(error)})")
    return module.enable(platform)


def launcher() -> Launcher | None:
    """Return `driver.launcher`, which launches graphs 2 us faster than torch does. None without cuda.bindings."""
    try:
        from specgraph_cuda.driver import launcher
    except ImportError:
        return None
    return launcher


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that measurements on this machine depend on."""
    major, minor = torch.cuda.get_device_capability(device)
    about = Path("/proc/driver/nvidia/version")
    words = about.read_text().split() if about.is_file() else []
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "compute capability": f"{major}.{minor}"}
    found |= {name: installed_version(name) for name in ("triton", "cuda-bindings")}
    found["driver"] = next((word for word in words if word[:1].isdigit() and "." in word), "")
    return {name: value for name, value in found.items() if value}


def triton_support(device: torch.device) -> Support:
    """Say whether the Triton kernels of the core can run on `device`."""
    if importlib.util.find_spec("triton") is None:
        return no("triton is not installed: pip install triton. The plain torch ops run, slower")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return no("the kernels need compute capability 8.0; the plain torch ops run, slower")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception as error:
        return no(f"triton is installed and fails to import: {type(error).__name__}: {error}")
    return yes()

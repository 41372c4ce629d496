"""What this machine and the GPU at hand offer: tried where that takes milliseconds, else read from versions."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from specgraph.errors import first_line
from specgraph.platforms import Capabilities, Platform, Probe, Support, no, quirk, trial, yes
from specgraph.platforms.installed import installed_version

if TYPE_CHECKING:
    from specgraph_cuda.platform import CudaPlatform


def probe() -> Probe:
    """Whether torch can drive a GPU here; if not, what is missing and how to get it."""
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is None:
        what = "is a ROCm build" if torch.version.hip else "has no CUDA support"
        return Probe(
            available=False,
            reason=f"torch {torch.__version__} {what}: install a CUDA build (https://pytorch.org/get-started)",
            versions=found,
        )
    found["cuda"] = torch.version.cuda
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # no driver, a driver too old, no device node: torch's message says which
        return Probe(available=False, reason=first_line(error), versions=found)
    if count == 0:
        return Probe(available=False, reason="the driver answers, but lists no GPU", versions=found)
    return Probe(available=True, device_count=count, versions=found)


def capabilities(platform: CudaPlatform) -> Capabilities:
    """Try out one GPU."""
    graphs = trial.claim(platform, trial.replays_follow_their_input)
    return Capabilities(
        graphs=graphs,
        merged_loop=graphs and trial.claim(platform, trial.a_loop_in_one_graph),
        task_update=graphs and task_update_support(platform),
        shared_pool=graphs and trial.claim(platform, trial.graphs_share_a_pool, "capture the largest graph first"),
        external_events=_external_events(),
        collectives_in_graph=_collectives(),
        random_in_graph=quirk("the default generator, and generators registered with the graph"),
        host_read_detection=quirk("synchronising reads are refused; a non_blocking copy to pinned memory is captured"),
        order_detection=no("use compute-sanitizer's racecheck, or run on the cpu platform"),
        notes={"triton": triton_support(platform.device), "conditional_nodes": _conditional_nodes()},
    )


def task_update_support(platform: CudaPlatform) -> Support:
    """Make task updates available if they work here."""
    try:
        from specgraph_cuda.tasks import TaskUpdates
    except ImportError as error:
        return no(f"cuda.bindings is missing: pip install cuda-bindings ({first_line(error)})")
    platform.tasks = TaskUpdates(platform)
    found = trial.claim(platform, _rewritten_values, "node parameters of the executable graph, through cuda.bindings")
    if not found:
        platform.tasks = None
    return found


def _rewritten_values(platform: Platform) -> str | None:
    """Host values captured in a kernel's parameters, rewritten for each replay without waiting in between."""
    from specgraph_cuda.host_values import store

    x, total = (torch.zeros(3, dtype=torch.int32, device=platform.device) for _ in range(2))
    store(x, [0, 0, 0])
    total.add_(x)
    platform.synchronize()
    graph = platform.graph()
    try:
        with graph.capture():
            with platform.task_group() as group:
                store(x, [1, 2, 3])
            total.add_(x)
        for values in ([5, 0, 7], [10, 20, 30]):
            with platform.task_update(group):
                store(x, values)
            graph.replay()
        seen = total.tolist()
        return None if seen == [15, 20, 37] else f"rewritten values added up to {seen} instead of [15, 20, 37]"
    finally:
        graph.close()


def versions(device: torch.device) -> dict[str, str]:
    """What a figure measured here depends on."""
    major, minor = torch.cuda.get_device_capability(device)
    found = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "compute capability": f"{major}.{minor}",
        "triton": installed_version("triton"),
        "cuda-bindings": installed_version("cuda-bindings"),
        "driver": _driver_version(),
    }
    return {name: value for name, value in found.items() if value}


def _driver_version() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _external_events() -> Support:
    try:
        torch.cuda.Event(external=True)
    except TypeError:
        return no(f"torch {torch.__version__} has no external events: 2.11 or newer has them")
    return yes()


def _collectives() -> Support:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return no("this torch has no NCCL")
    return quirk("NCCL can be captured; not tried by this probe")


def _conditional_nodes() -> Support:
    if hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        return quirk("IF nodes through torch; WHILE nodes only through cuda.bindings, or torch 2.15")
    return no(f"torch {torch.__version__} captures no IF nodes (2.12 and newer do)")


def triton_support(device: torch.device) -> Support:
    """Whether the Triton kernels of the core can run on `device`."""
    if importlib.util.find_spec("triton") is None:
        return no("triton is not installed: pip install triton. The plain torch ops run, slower")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return no("the kernels need compute capability 8.0; the plain torch ops run, slower")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception as error:
        return no(f"triton is installed and fails to import: {type(error).__name__}: {error}")
    return yes()

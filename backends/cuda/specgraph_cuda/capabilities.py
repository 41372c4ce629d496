"""What the GPU at hand offers: tried where that is cheap, else read off versions; each with its reason."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

import torch

from specgraph.platforms import Capabilities, Platform, Support, no, quirk, trial, yes


def found_capabilities(platform: Platform) -> Capabilities:
    """Probe one GPU."""
    device = platform.device
    graphs = trial.claim(platform, trial.replays_follow_their_input)
    pool = trial.claim(platform, trial.graphs_share_a_pool, "torch's private pools; capture the largest graph first")
    return Capabilities(
        graphs=graphs,
        shared_pool=pool if graphs else graphs,
        external_events=_external_events(device),
        task_update=no("attention here reads lengths from device tensors, so there is nothing to rewrite"),
        merged_loop=trial.claim(platform, trial.a_loop_in_one_graph) if graphs else graphs,
        collectives_in_graph=_collectives(),
        conditional_nodes=_conditional_nodes(),
        random_in_graph=quirk("the default generator, and generators registered with the graph"),
        host_read_detection=quirk("synchronising reads are refused; a non_blocking copy to pinned memory is captured"),
        order_detection=no("use compute-sanitizer's racecheck, or run on the cpu platform"),
        triton=_triton(device),
        max_live_graphs=None,
        update_order="before_replay",
        default_lowering="merged",
    )


def versions(device: torch.device) -> dict[str, str]:
    """What a figure measured here depends on."""
    properties = torch.cuda.get_device_properties(device)
    found = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "compute capability": f"{properties.major}.{properties.minor}",
    }
    for name in ("triton", "cuda-bindings"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    driver = _driver_version()
    return found | ({"driver": driver} if driver else {})


def _driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _external_events(device: torch.device) -> Support:
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
    other = "cuda.bindings is installed and can" if importlib.util.find_spec("cuda") else "cuda.bindings could"
    return no(f"torch {torch.__version__} captures no IF nodes (2.12 and newer do); {other} make them")


def _triton(device: torch.device) -> Support:
    if importlib.util.find_spec("triton") is None:
        return no("triton is not installed: pip install triton. The plain torch ops run, slower")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return no("the kernels need compute capability 8.0; the plain torch ops run, slower")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception as error:
        return no(f"triton is installed and fails to import: {type(error).__name__}: {error}")
    return yes()

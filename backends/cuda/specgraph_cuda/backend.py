"""The plugin: NVIDIA GPUs as the platform `cuda`."""

from __future__ import annotations

import torch

from specgraph.device import Backend, Platform, Probe, hookimpl
from specgraph.errors import PlatformError, first_line


def probe() -> Probe:
    """Say whether torch can drive a GPU here. If it can't, the reason names the missing part and how to get it."""
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is None:
        what = "is a ROCm build" if torch.version.hip else "has no CUDA support"
        reason = f"torch {torch.__version__} {what}: install a CUDA build (https://pytorch.org/get-started)"
        return Probe(available=False, reason=reason, versions=found)
    found["cuda"] = torch.version.cuda
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # no driver, a driver too old, no device node: torch's message says which
        return Probe(available=False, reason=first_line(error), versions=found)
    reason = "" if count else "the driver answers, but lists no GPU"
    return Probe(available=count > 0, reason=reason, device_count=count, versions=found)


def open_device(index: int) -> Platform:
    """Open GPU `index`. Raises PlatformError if no GPU answers, or if this one's compute capability is below 7.0."""
    found = probe()
    if not found.available:
        raise PlatformError(f"platform 'cuda' is not available: {found.reason}")
    from specgraph_cuda.platform import CudaPlatform

    return CudaPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Return the cuda backend. specgraph's discovery calls it."""
    return Backend(name="cuda", probe=probe, open=open_device, api=2, supersedes=frozenset({"accelerator"}))

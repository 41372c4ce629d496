"""The plugin: says whether an NVIDIA GPU answers here, and opens it."""

from __future__ import annotations

from specgraph.errors import PlatformError
from specgraph.platforms import Backend, Platform, Probe, hookimpl


def probe() -> Probe:
    """Whether torch can drive a GPU here; if not, what is missing and how to get it."""
    import torch

    versions = {"torch": torch.__version__}
    if torch.version.cuda is None:
        what = "is a ROCm build" if getattr(torch.version, "hip", None) else "has no CUDA support"
        return Probe(
            available=False,
            reason=f"torch {torch.__version__} {what}: install a CUDA build (https://pytorch.org/get-started)",
            versions=versions,
        )
    versions["cuda"] = torch.version.cuda
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # no driver, a driver too old, no device node: torch's message says which
        return Probe(available=False, reason=_first_line(error), versions=versions)
    if count == 0:
        return Probe(available=False, reason="the driver answers, but lists no GPU", versions=versions)
    return Probe(available=True, device_count=count, versions=versions)


def open_device(index: int) -> Platform:
    """Open GPU `index`.

    Raises:
        PlatformError: it does not answer, or is older than what torch supports.
    """
    found = probe()
    if not found.available:
        raise PlatformError(f"platform 'cuda' is not available: {found.reason}")
    from specgraph_cuda.platform import CudaPlatform

    return CudaPlatform(index)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@hookimpl
def specgraph_backend() -> Backend:
    """NVIDIA GPUs."""
    return Backend(name="cuda", probe=probe, open=open_device)

"""The plugin: NVIDIA GPUs as the platform `cuda`."""

from __future__ import annotations

from specgraph.errors import PlatformError
from specgraph.platforms import Backend, Platform, hookimpl
from specgraph_cuda.probe import probe


def open_device(index: int) -> Platform:
    """Open GPU `index`.

    Raises:
        PlatformError: no GPU answers, or this one is older than what is supported.
    """
    found = probe()
    if not found.available:
        raise PlatformError(f"platform 'cuda' is not available: {found.reason}")
    from specgraph_cuda.platform import CudaPlatform

    return CudaPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Called by specgraph's discovery."""
    return Backend(name="cuda", probe=probe, open=open_device, api=2)

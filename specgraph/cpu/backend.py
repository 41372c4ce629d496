"""The plugin of the `cpu` platform: always available."""

from __future__ import annotations

import torch

from specgraph.device.discovery import Backend, Probe, hookimpl
from specgraph.device.interface import PLATFORM_API, Platform


def _probe() -> Probe:
    return Probe(available=True, device_count=1, versions={"torch": torch.__version__})


def _open(index: int) -> Platform:
    from specgraph.cpu.platform import CpuPlatform

    return CpuPlatform()


@hookimpl
def specgraph_backend() -> Backend:
    """Return the CPU, with recorded graphs. It is chosen by name, or if no accelerator is available."""
    return Backend(name="cpu", probe=_probe, open=_open, api=PLATFORM_API, accelerator=False)

"""The plugin: torch's accelerator as the platform `accelerator`."""

from __future__ import annotations

from specgraph.device import Backend, Platform, hookimpl

from specgraph_accelerator.probe import probe


def open_device(index: int) -> Platform:
    """Open device `index` of torch's accelerator."""
    from specgraph_accelerator.platform import AcceleratorPlatform

    return AcceleratorPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Return the backend for the accelerator that torch names. Backends written for one vendor supersede this one."""
    return Backend(name="accelerator", probe=probe, open=open_device, api=2)

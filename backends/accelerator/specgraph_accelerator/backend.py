"""The plugin: says whether torch's accelerator has graphs, and opens it."""

from __future__ import annotations

from specgraph.device import Backend, Platform, hookimpl

from specgraph_accelerator.probe import probe


def open_device(index: int) -> Platform:
    """Open device `index` of torch's accelerator."""
    from specgraph_accelerator.platform import AcceleratorPlatform

    return AcceleratorPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Return the accelerator of this process, whichever torch names. Backends written for one vendor supersede this
    one."""
    return Backend(name="accelerator", probe=probe, open=open_device, api=2)

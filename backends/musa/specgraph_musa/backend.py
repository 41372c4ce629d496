"""The plugin: says whether a Moore Threads GPU answers here, and opens it."""

from __future__ import annotations

from specgraph.device import Backend, Platform, hookimpl

from specgraph_musa.probe import probe


def open_device(index: int) -> Platform:
    """Open GPU `index`."""
    from specgraph_musa.platform import MusaPlatform

    return MusaPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Moore Threads GPUs. torchada shows them through torch.cuda too, so an answering `cuda` is then this device."""
    return Backend(name="musa", probe=probe, open=open_device, api=2, supersedes=frozenset({"cuda", "accelerator"}))

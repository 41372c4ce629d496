"""The plugin: Moore Threads GPUs as the platform `musa`."""

from __future__ import annotations

from specgraph.device import Backend, Platform, hookimpl

from specgraph_musa.probe import probe


def open_device(index: int) -> Platform:
    """Open GPU `index`."""
    from specgraph_musa.platform import MusaPlatform

    return MusaPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """Return the musa backend. It supersedes `cuda`: with torchada installed, torch.cuda drives the same devices."""
    return Backend(name="musa", probe=probe, open=open_device, api=2, supersedes=frozenset({"cuda", "accelerator"}))

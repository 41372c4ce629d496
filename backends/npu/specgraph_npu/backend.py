"""The plugin: Ascend NPUs as the platform `npu`."""

from importlib import import_module

from specgraph.device import Backend, hookimpl
from specgraph_npu.probe import probe


@hookimpl
def specgraph_backend() -> Backend:
    """Return the npu backend. Its platform is imported when a device is opened."""
    return Backend(
        name="npu",
        probe=probe,
        open=lambda i: import_module("specgraph_npu.platform").NpuPlatform(i),
        api=2,
        supersedes=frozenset({"accelerator"}),
    )

"""The entry point: how specgraph finds this backend."""

from importlib import import_module

from specgraph.device import Backend, hookimpl
from specgraph_npu.probe import probe


@hookimpl
def specgraph_backend() -> Backend:
    """Return the npu backend. Its platform is imported when one is opened."""
    return Backend(
        name="npu",
        probe=probe,
        open=lambda i: import_module("specgraph_npu.platform").NpuPlatform(i),
        api=2,
        supersedes=frozenset({"accelerator"}),
    )

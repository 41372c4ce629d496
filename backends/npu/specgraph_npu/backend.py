"""The entry point: how specgraph finds this backend."""

from __future__ import annotations

from specgraph.platforms import Backend, Platform, hookimpl
from specgraph_npu.probe import probe


def _open(index: int) -> Platform:
    from specgraph_npu.platform import NpuPlatform

    return NpuPlatform(index)


@hookimpl
def specgraph_backend() -> Backend:
    """The npu backend."""
    return Backend(name="npu", probe=probe, open=_open, api=2)

"""A platform that passes everything on to the real one: broken platforms override one verb of it."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import pytest
import specgraph_conformance.session

from specgraph.device import Graph, Platform


class WrappedGraph(Graph):
    """Passes everything on."""

    def __init__(self, inner: Graph, platform: WrappedPlatform) -> None:
        self.inner, self.platform = inner, platform

    @property
    def pool(self) -> Any:
        return self.inner.pool

    @property
    def is_closed(self) -> bool:
        return self.inner.is_closed

    def capture(self, **options: Any) -> Any:
        return self.inner.capture(**options)

    def replay(self) -> None:
        self.inner.replay()

    def reset(self) -> None:
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()

    def _unused(self, *args: Any) -> None:
        raise AssertionError("the inner graph has primitives of its own")

    _begin = _end = _abandon = _launch = _destroy = _unused


class WrappedPlatform(Platform):
    """Passes everything on."""

    graph_type: Any = WrappedGraph

    def __init__(self, inner: Platform) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    info = property(lambda self: self.inner.info)
    capabilities = property(lambda self: self.inner.capabilities)
    capture_stream = property(lambda self: self.inner.capture_stream)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def memory(self) -> Any:
        return self.inner.memory()

    def stream(self) -> Any:
        return self.inner.stream()

    def current_stream(self) -> Any:
        return self.inner.current_stream()

    def use(self, stream: Any) -> Any:
        return self.inner.use(stream)

    def event(self, *, timing: bool = False, external: bool = False) -> Any:
        return self.inner.event(timing=timing, external=external)

    def graph_pool(self) -> Any:
        return self.inner.graph_pool()

    def graph(self, pool: Any = None) -> Any:
        return self.graph_type(self.inner.graph(pool), self)

    def is_capturing(self) -> bool:
        return self.inner.is_capturing()

    def close(self) -> None:
        self.inner.close()

    def task_group(self) -> Any:
        return self.inner.task_group()

    def task_update(self, group: Any) -> Any:
        return self.inner.task_update(group)

    def attention_backends(self) -> Any:
        return self.inner.attention_backends()


def install(patch: pytest.MonkeyPatch, broken: type[WrappedPlatform]) -> None:
    """The suite opens `broken` around the platform that was asked for."""
    real = specgraph_conformance.session.open_platform
    patch.setattr(specgraph_conformance.session, "open_platform", lambda name, **options: broken(real(name, **options)))

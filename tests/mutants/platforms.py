"""Broken platforms: each a wrapper around the real one, wrong in one verb."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import specgraph_conformance.session
from mutants.registry import mutant

from specgraph.platforms import Graph, Platform


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


class _Dropped(Exception):
    """Ends an update block so that the real platform rewrites nothing."""


@mutant("wrapper-hides-type", "platform")
def wrapper_hides_type(patch: pytest.MonkeyPatch) -> None:
    """graph() gives a wrapper that has all of Graph's methods and isn't one."""

    class Lookalike:
        def __init__(self, inner: Graph, platform: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Broken(WrappedPlatform):
        graph_type = Lookalike

    install(patch, Broken)


@mutant("capture-left-broken", "platform")
def capture_left_broken(patch: pytest.MonkeyPatch) -> None:
    """After an exception in a capture the stream goes on capturing."""

    class Leaky(WrappedGraph):
        @contextmanager
        def capture(self, **options: Any) -> Iterator[None]:
            try:
                with self.inner.capture(**options):
                    yield
            except BaseException:
                self.platform.is_stuck = True
                raise

    class Broken(WrappedPlatform):
        graph_type = Leaky
        is_stuck = False

        def is_capturing(self) -> bool:
            return self.is_stuck or self.inner.is_capturing()

    install(patch, Broken)


@mutant("reset-leaks-pool", "platform")
def reset_leaks_pool(patch: pytest.MonkeyPatch) -> None:
    """reset() and close() drop the graph and never give its memory back."""
    kept: list[Graph] = []

    class Leaky(WrappedGraph):
        _closed = False

        @property
        def is_closed(self) -> bool:
            return self._closed

        def reset(self) -> None:
            kept.append(self.inner)
            self.inner = self.platform.inner.graph()

        def close(self) -> None:
            self._closed = True
            kept.append(self.inner)

    class Broken(WrappedPlatform):
        graph_type = Leaky

    install(patch, Broken)


@mutant("pool-clash", "platform")
def pool_clash(patch: pytest.MonkeyPatch) -> None:
    """There is one pool for everybody, whoever asks."""

    class Broken(WrappedPlatform):
        only: Any = None

        def graph_pool(self) -> Any:
            self.only = self.only or self.inner.graph_pool()
            return self.only

        def graph(self, pool: Any = None) -> Any:
            return self.graph_type(self.inner.graph(self.graph_pool()), self)

    install(patch, Broken)


@mutant("update-dropped", "platform")
def update_dropped(patch: pytest.MonkeyPatch) -> None:
    """A task update opens the gate and rewrites nothing."""

    class Broken(WrappedPlatform):
        @contextmanager
        def task_update(self, group: Any) -> Iterator[None]:
            try:
                with self.inner.task_update(group):
                    yield
                    raise _Dropped
            except _Dropped:
                group.is_updated = True

    install(patch, Broken)


@mutant("update-missing", "platform")
def update_missing(patch: pytest.MonkeyPatch) -> None:
    """Nothing gates the captured tasks: a replay without an update runs with the last lengths."""

    class Ungated(WrappedGraph):
        def replay(self) -> None:
            for group in self.platform.groups:
                group.is_updated = True
            self.inner.replay()

    class Broken(WrappedPlatform):
        graph_type = Ungated

        def __init__(self, inner: Platform) -> None:
            super().__init__(inner)
            self.groups: list[Any] = []

        @contextmanager
        def task_group(self) -> Iterator[Any]:
            with self.inner.task_group() as group:
                self.groups.append(group)
                yield group

    install(patch, Broken)


@mutant("update-before-previous-replay-ends", "platform")
def update_before_previous_replay_ends(patch: pytest.MonkeyPatch) -> None:
    """An update that is issued while the previous replay still runs is overtaken by it and lost."""

    class Overtaken(WrappedGraph):
        def replay(self) -> None:
            self.inner.replay()
            self.platform.is_running = True

    class Broken(WrappedPlatform):
        graph_type = Overtaken
        is_running = False

        def synchronize(self) -> None:
            self.inner.synchronize()
            self.is_running = False

        @contextmanager
        def task_update(self, group: Any) -> Iterator[None]:
            try:
                with self.inner.task_update(group):
                    yield
                    if self.is_running:
                        raise _Dropped
            except _Dropped:
                pass

    install(patch, Broken)

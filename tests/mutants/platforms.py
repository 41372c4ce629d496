"""Broken platforms: each a wrapper around the real one, wrong in one verb."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import specgraph_conformance.session
import torch
from mutants.registry import mutant

from specgraph.platforms import Discovered, Graph, Platform, Probe
from specgraph.reference.tasks import UpdateMode


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


@mutant("replay-on-default-stream", "platform")
def replay_on_default_stream(patch: pytest.MonkeyPatch) -> None:
    """A replay goes to the default stream, whatever stream is current."""

    class OnDefault(WrappedGraph):
        def replay(self) -> None:
            with self.platform.use(self.platform.default):
                self.inner.replay()

    class Broken(WrappedPlatform):
        graph_type = OnDefault

        def __init__(self, inner: Platform) -> None:
            super().__init__(inner)
            self.default = inner.current_stream()

    install(patch, Broken)


def _with_elapsed_time(patch: pytest.MonkeyPatch, change: Any) -> None:
    class Broken(WrappedPlatform):
        def event(self, *, timing: bool = False, external: bool = False) -> Any:
            event = self.inner.event(timing=timing, external=external)
            real = event.elapsed_time
            event.elapsed_time = lambda end: change(real(end))  # type: ignore[method-assign]
            return event

    install(patch, Broken)


@mutant("elapsed-time-units", "platform")
def elapsed_time_in_seconds(patch: pytest.MonkeyPatch) -> None:
    """elapsed_time() gives seconds."""
    _with_elapsed_time(patch, lambda milliseconds: milliseconds / 1e3)


@mutant("elapsed-time-units-zero", "platform", hazard="elapsed-time-units")
def elapsed_time_is_zero(patch: pytest.MonkeyPatch) -> None:
    """elapsed_time() is always 0."""
    _with_elapsed_time(patch, lambda milliseconds: 0.0 * milliseconds)


@mutant("reserved-is-allocated", "platform")
def reserved_is_allocated(patch: pytest.MonkeyPatch) -> None:
    """memory().reserved is the bytes of living tensors."""

    class Broken(WrappedPlatform):
        def memory(self) -> Any:
            memory = self.inner.memory()
            return replace(memory, reserved=memory.allocated)

    install(patch, Broken)


class GraphsByPool(WrappedPlatform):
    """Knows which graphs were made in a pool."""

    def __init__(self, inner: Platform) -> None:
        super().__init__(inner)
        self.graphs: list[Graph] = []

    def graph(self, pool: Any = None) -> Any:
        made = super().graph(pool)
        self.graphs.append(made.inner)
        return made

    def close_all_in(self, pool: Any) -> None:
        for graph in self.graphs:
            if graph.pool is pool:
                graph.close()


@mutant("pool-closed-under-graphs", "platform")
def pool_closed_under_graphs(patch: pytest.MonkeyPatch) -> None:
    """close() of a pool releases the memory of the graphs that are still in it."""

    class Broken(GraphsByPool):
        def graph_pool(self) -> Any:
            pool = self.inner.graph_pool()
            real = pool.close

            def close() -> None:
                self.close_all_in(pool)
                real()

            pool.close = close  # type: ignore[method-assign]
            return pool

    install(patch, Broken)


@mutant("graph-closes-shared-pool", "platform")
def graph_closes_shared_pool(patch: pytest.MonkeyPatch) -> None:
    """close() of one graph releases the memory of all graphs in its pool."""

    class Closing(WrappedGraph):
        def close(self) -> None:
            self.platform.close_all_in(self.inner.pool)

    class Broken(GraphsByPool):
        graph_type = Closing

    install(patch, Broken)


@mutant("shared-pool-not-shared", "platform")
def shared_pool_not_shared(patch: pytest.MonkeyPatch) -> None:
    """graph(pool) names the pool and allocates from another one."""

    class Named(WrappedGraph):
        named: Any = None

        @property
        def pool(self) -> Any:
            return self.named or self.inner.pool

    class Broken(WrappedPlatform):
        def graph(self, pool: Any = None) -> Any:
            made = Named(self.inner.graph(), self)
            made.named = pool
            return made

    install(patch, Broken)


def two_devices(patch: pytest.MonkeyPatch, *, open_index: Any = lambda index: index) -> None:
    """The backend under test has two devices, and `open(index)` opens the one that `open_index` gives."""

    class Indexed(WrappedPlatform):
        index = 0
        info = property(lambda self: replace(self.inner.info, device=torch.device("cpu", self.index)))

    def open_device(real: Any, index: int) -> Platform:
        made = Indexed(real(0))
        made.index = open_index(index)
        return made

    real_discover = specgraph_conformance.session.discover

    def discover() -> Any:
        found = dict(real_discover())
        for name, item in found.items():
            if (real := item.backend) is not None:
                backend = replace(
                    real,
                    probe=lambda real=real: replace(real.probe(), device_count=2),
                    open=lambda index, real=real: open_device(real.open, index),
                )
                found[name] = replace(item, backend=backend)
        return MappingProxyType(found)

    patch.setattr(specgraph_conformance.session, "discover", discover)


@mutant("open-ignores-index", "platform")
def open_ignores_index(patch: pytest.MonkeyPatch) -> None:
    """`name:1` opens device 0."""
    two_devices(patch, open_index=lambda index: 0)


@mutant("probe-cached", "platform")
def probe_cached(patch: pytest.MonkeyPatch) -> None:
    """The first answer of a backend's probe is kept for the life of the process."""
    real, kept = Discovered.probe, dict[str, Probe]()
    patch.setattr(Discovered, "probe", lambda self: kept.setdefault(self.name, real(self)))


class Ungating(WrappedPlatform):
    """Knows its task groups, and opens the gates of some of them before each replay."""

    class graph_type(WrappedGraph):
        def replay(self) -> None:
            for group in self.platform.open_groups(self.platform.groups):
                group.is_updated = True
            self.inner.replay()

    def __init__(self, inner: Platform) -> None:
        super().__init__(inner)
        self.groups: list[Any] = []

    @contextmanager
    def task_group(self) -> Iterator[Any]:
        with self.inner.task_group() as group:
            self.groups.append(group)
            yield group


@mutant("one-group-not-gated", "platform")
def only_the_first_group_is_gated(patch: pytest.MonkeyPatch) -> None:
    """Only the first group of a graph waits for its update."""

    class Broken(Ungating):
        open_groups = staticmethod(lambda groups: groups[1:])

    install(patch, Broken)


@mutant("one-group-not-gated-last", "platform", hazard="one-group-not-gated")
def only_the_last_group_is_gated(patch: pytest.MonkeyPatch) -> None:
    """Only the last group of a graph waits for its update."""

    class Broken(Ungating):
        open_groups = staticmethod(lambda groups: groups[:-1])

    install(patch, Broken)


def _commit_some(patch: pytest.MonkeyPatch, chosen: slice) -> None:
    real = UpdateMode.commit

    def commit(self: Any) -> None:
        tasks = self._group.tasks
        kept = [(task, task.args, task.kwargs) for i, task in enumerate(tasks) if i not in range(len(tasks))[chosen]]
        real(self)
        for task, args, kwargs in kept:
            task.args, task.kwargs = args, kwargs
            task.compile()

    patch.setattr(UpdateMode, "commit", commit)


@mutant("group-partly-rewritten", "platform")
def only_the_last_op_is_rewritten(patch: pytest.MonkeyPatch) -> None:
    """A task update rewrites the last op of its group only."""
    _commit_some(patch, slice(-1, None))


@mutant("group-partly-rewritten-first", "platform", hazard="group-partly-rewritten")
def only_the_first_op_is_rewritten(patch: pytest.MonkeyPatch) -> None:
    """A task update rewrites the first op of its group only."""
    _commit_some(patch, slice(0, 1))

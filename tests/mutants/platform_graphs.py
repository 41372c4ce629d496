"""Broken graphs and pools: what a capture leaves behind, and whose memory is whose."""

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from mutants.platform_wrapper import WrappedGraph, WrappedPlatform, install
from mutants.registry import mutant

import specgraph.device.graph
from specgraph.cpu.recorder import Recorder
from specgraph.cpu.stream import CpuEvent
from specgraph.cpu.tasks import Task
from specgraph.device import Graph, GraphPool, Platform, no


@mutant("wrapper-hides-type")
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


@mutant("capture-left-broken")
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


@mutant("reset-leaks-pool")
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


@mutant("pool-clash")
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


@mutant("fork-passed-over")
def fork_passed_over(patch: pytest.MonkeyPatch) -> None:
    """A device that says that captures have one stream passes over waits for their work."""

    class Broken(WrappedPlatform):
        capabilities = property(
            lambda self: replace(self.inner.capabilities, fork_in_capture=no("captures have one stream"))
        )

    wait, record = CpuEvent.wait, Recorder._record

    def wait_outside(self: CpuEvent, stream: Any = None) -> None:
        if self._platform.recorder is None:
            wait(self, stream)

    def record_one_stream(self: Any, call: Any) -> Any:
        if self.order.clock_of(self._platform.current_stream()) is None:
            return call.func(*call.args, **call.kwargs)  # runs at once
        return record(self, call)

    patch.setattr(CpuEvent, "wait", wait_outside)
    patch.setattr(Recorder, "_record", record_one_stream)
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


@mutant("pool-closed-under-graphs")
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


@mutant("graph-closes-shared-pool")
def graph_closes_shared_pool(patch: pytest.MonkeyPatch) -> None:
    """close() of one graph releases the memory of all graphs in its pool."""

    class Closing(WrappedGraph):
        def close(self) -> None:
            self.platform.close_all_in(self.inner.pool)

    class Broken(GraphsByPool):
        graph_type = Closing

    install(patch, Broken)


@mutant("shared-pool-not-shared")
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


@mutant("pool-keeps-failed-capture", "specgraph.device.pool:GraphPool.leave")
def pool_keeps_failed_capture(real: Any, self: GraphPool, handle: Any) -> None:
    """A graph whose capture failed stays in its pool."""
    if sys.exc_info()[0] is None:
        real(self, handle)


@mutant("retired-pool-reused", "specgraph.device.pool:GraphPool.retire")
def retired_pool_reused(real: Any, self: Any, handle: Any) -> None:
    """The vendor's pool goes to the next capture after it was released with its last graph."""


@mutant("collector-left-off")
def collector_left_off(patch: pytest.MonkeyPatch) -> None:
    """The garbage collector stays off after a capture."""
    left_off = SimpleNamespace(isenabled=gc.isenabled, disable=gc.disable, enable=lambda: None)
    patch.setattr(specgraph.device.graph, "gc", left_off)


@mutant("dropped-graph-keeps-memory", "specgraph.device:Graph.__del__")
def dropped_graph_keeps_memory(real: Any, self: Graph) -> None:
    """A graph that nobody closed keeps its share of the pool for ever."""


@mutant("recorded-op-loses-its-result", "specgraph.cpu.tasks:Task.compile")
def recorded_op_loses_its_result(real: Any, self: Task) -> None:
    """A replay runs an op that writes arguments for its writes only: the tensor that it returns stays as it was."""
    real(self)
    if self.func._schema.is_mutable and self.outputs:
        self.call = partial(self.func, *self.args, **self.kwargs)


@mutant("swallowed-host-read", "specgraph.cpu.recorder:Recorder.invalidate")
def refused_reads_are_forgotten(real: Any, self: Recorder, error: Exception) -> None:
    """A host read raises, and the capture goes on and ends where the captured code swallows the error."""


@mutant("swallowed-host-read-shapes", "specgraph.cpu.recorder:Recorder.invalidate")
def refused_shapes_are_forgotten(real: Any, self: Recorder, error: Exception) -> None:
    """Only reads of one value end a capture for good, not those of a shape that follows from values."""
    if "nonzero" not in str(error):
        real(self, error)


@mutant("outputs-of-one-op", "specgraph.cpu.tasks:Task.compile")
def two_results(real: Any, self: Task) -> None:
    """A replay writes the first two results of an op."""
    self.outputs = self.outputs[:2]
    real(self)


@mutant("outputs-of-one-op-exchanged", "specgraph.cpu.tasks:Task.compile")
def exchanged_results(real: Any, self: Task) -> None:
    """The last two of three results of an op are exchanged in a replay."""
    if len(self.outputs) == 3:
        (_, second), (_, third) = self.outputs[1:]
        self.outputs = [self.outputs[0], (1, third), (2, second)]
    real(self)

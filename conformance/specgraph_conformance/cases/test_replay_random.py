"""Random use of graphs: captures, replays, updates, closes and drops in any order, compared with the host's results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from specgraph.device import Graph, GraphPool, Platform, Stream
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.state_machines import Machine, run_machine, step
from specgraph_conformance.task_rig import Tasks, replayed

TENSORS, WIDTH, MOST_GRAPHS = 3, 300, 4
EXAMPLES, STEPS = 20, 20
"""The machine's runs in one case, and the steps of each."""

OPS: dict[str, Callable[[Tensor, Tensor, int], object]] = {
    "fill": lambda a, b, number: a.fill_(number),
    "add": lambda a, b, number: a.add_(number),
    "scale": lambda a, b, number: a.mul_(0.5),
    "copy": lambda a, b, number: a.copy_(b),
    "add tensor": lambda a, b, number: a.add_(b),
    "through new memory": lambda a, b, number: a.copy_((b + number) * 2),
    "part": lambda a, b, number: a[7:130].copy_(b[140:263]),
}
"""Name -> the op on two tensors. It is exact in float32, or rounded in the same way on every device."""


@dataclass(frozen=True)
class Op:
    """One op of a program."""

    name: str
    written: int
    read: int
    number: int
    apart: bool
    """Run the op on a second stream, ordered before and after."""


PLACE = st.integers(0, TENSORS - 1)
PROGRAM = st.lists(
    st.builds(Op, st.sampled_from(sorted(OPS)), PLACE, PLACE, st.integers(-9, 9), st.booleans()), min_size=1, max_size=4
)
MEANWHILE = st.lists(st.sampled_from(["drop", "replay", "write"]), min_size=1, max_size=3)
LENGTHS = st.lists(st.integers(1, 64), min_size=3, max_size=3)


class RandomGraphs(Machine):
    """Tensors on the device with copies on the host, and graphs that write them, in a shared pool or in their own."""

    platform: Platform
    tasks: Tasks | None
    """A graph with host parameters. None if the platform has no task updates."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(TENSORS * WIDTH, dtype=torch.float32).view(TENSORS, WIDTH)
        self.wanted = [row.clone() for row in numbers]
        self.seen = [row.to(self.platform.device, copy=True) for row in numbers]
        self.side: Stream = self.platform.stream()
        self.shared: GraphPool | None = self.platform.graph_pool() if self.platform.capabilities.shared_pool else None
        self.graphs: list[tuple[Graph, list[Op]]] = []
        self.lengths: list[int] | None = None

    def on_device(self, program: list[Op], forks: bool = True) -> None:
        """Issue the ops on the device. An op that is `apart` goes to the second stream."""
        main = self.platform.current_stream()
        for op in program:
            apart = op.apart and forks
            if apart:
                self.side.wait_stream(main)
            with self.platform.use(self.side) if apart else nullcontext():
                OPS[op.name](self.seen[op.written], self.seen[op.read], op.number)
            if apart:
                main.wait_stream(self.side)

    def as_run(self, program: list[Op]) -> None:
        """Run the ops on the host's copies."""
        for op in program:
            OPS[op.name](self.wanted[op.written], self.wanted[op.read], op.number)

    @step(program=PROGRAM)
    def write(self, program: list[Op]) -> None:
        """Run ops outside of graphs."""
        self.on_device(program)
        self.as_run(program)

    @precondition(lambda self: len(self.graphs) < MOST_GRAPHS)
    @step(program=PROGRAM, shares=st.booleans(), fails=st.sampled_from([False, False, False, True]))
    def capture(self, program: list[Op], shares: bool, fails: bool) -> None:
        """Run a program once as warm-up, and capture it without running it. The captured block may raise at its end."""
        platform, forks = self.platform, bool(self.platform.capabilities.fork_in_capture)
        platform.synchronize()
        with platform.use(platform.capture_stream):
            self.on_device(program, forks)
        self.as_run(program)
        platform.synchronize()
        graph = platform.graph(self.shared if shares else None)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(), graph.capture():
            self.on_device(program, forks)
            if fails:
                raise ZeroDivisionError
        if fails:
            graph.close()
        else:
            self.graphs.append((graph, program))

    @precondition(lambda self: self.graphs)
    @step(place=st.integers(0, 99), times=st.integers(1, 3), aside=st.booleans())
    def replay(self, place: int, times: int, aside: bool) -> None:
        """Replay one graph on this stream, or on another stream with waits before and after."""
        graph, program = self.graphs[place % len(self.graphs)]
        main = self.platform.current_stream()
        if aside:
            self.side.wait_stream(main)
        with self.platform.use(self.side) if aside else nullcontext():
            for _ in range(times):
                graph.replay()
                self.as_run(program)
        if aside:
            main.wait_stream(self.side)

    @precondition(lambda self: self.graphs)
    @step(place=st.integers(0, 99), way=st.sampled_from(["close", "drop", "recapture"]), program=PROGRAM)
    def end(self, place: int, way: str, program: list[Op]) -> None:
        """Close a graph, drop it for the collector, or capture another program with it. It may have queued launches."""
        if way == "drop":
            self.drop(place)
            return
        graph, _ = self.graphs.pop(place % len(self.graphs))
        if way == "close":
            graph.close()
            return
        graph.reset()
        self.write(program)
        self.platform.synchronize()
        with graph.capture():
            self.on_device(program, bool(self.platform.capabilities.fork_in_capture))
        self.graphs.append((graph, program))

    def drop(self, place: int) -> None:
        """Drop a graph that is in a reference cycle, so that the collector finds it."""
        cycle: list[object] = [self.graphs.pop(place % len(self.graphs))]
        cycle.append(cycle)
        del cycle
        gc.collect()

    @precondition(lambda self: self.tasks)
    @step(lengths=LENGTHS, between=MEANWHILE, inside=st.booleans(), place=st.integers(0, 99), program=PROGRAM)
    def update(self, lengths: list[int], between: list[str], inside: bool, place: int, program: list[Op]) -> None:
        """Replay and update the graph with host parameters, with other work in between. A graph may be dropped inside
        the update."""
        tasks = self.tasks
        assert tasks is not None

        def drop_inside() -> None:
            if inside and self.graphs:
                self.drop(place)

        with replayed(self.platform, tasks.graph):
            for what in between:
                if what == "write" or not self.graphs:
                    self.write(program)
                elif what == "drop":
                    self.drop(place)
                else:
                    self.replay(place, 1, False)
            tasks.update_steps(tasks.lengths(lengths), during=drop_inside)
        self.lengths = lengths

    @step()
    def compare(self) -> None:
        """Check that all tensors equal the host's copies."""
        self.platform.synchronize()
        for number, (seen, wanted) in enumerate(zip(self.seen, self.wanted, strict=True)):
            expect_equal(on_host(seen), wanted, f"tensor {number}")
        if self.tasks is not None and self.lengths is not None:
            seen, wanted = self.tasks.result(), self.tasks.eager(self.tasks.lengths(self.lengths))
            expect_equal(seen, wanted, "attention of the graph with host parameters")
            self.lengths = None

    def teardown(self) -> None:
        self.compare()
        for graph, _ in self.graphs:
            graph.close()
        self.graphs.clear()
        if self.shared is not None:
            assert self.shared.num_graphs == 0, "a graph that is gone still holds its pool"
            self.shared.close()


@case(
    "replay.random-graphs",
    "Graphs that are captured, replayed, updated, closed, dropped and captured again in any order, on any stream, from "
    "shared pools and their own, leave in memory what the same ops leave on the host.",
    cause="the steps named below, which are the fewest that show it: what the last one leaves behind or takes over",
    timeout=400,
)
def test_random(platform: Platform, seed: int, examples: int) -> None:
    tasks = Tasks(platform) if platform.capabilities.task_update else None
    run_machine(RandomGraphs, {"platform": platform, "tasks": tasks}, seed, EXAMPLES * examples, STEPS)
    if tasks is not None:
        tasks.graph.close()

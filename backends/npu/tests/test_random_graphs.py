"""Random graphs with task groups under random schedules of the device, against the same program on the host.

SCHEDULES is how many are run (40 unless told); a failure names its seed. Every wait of the host is bounded by the
simulated runtime, which answers a hang with an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch

from specgraph.errors import UpdateError

SCHEDULES = int(os.environ.get("SCHEDULES", "40"))
TENSORS = 4


@dataclass
class Fill:
    """Sets a tensor to a host parameter."""

    tensor: int
    value: float


@dataclass
class Group:
    """A task group of 1 to 3 fills. `values` are those of its last update, or of the capture."""

    fills: list[Fill]
    handle: Any = None


@dataclass
class Side:
    """Work on a stream that is forked off and joined: one tensor is doubled beside another one's addition."""

    doubled: int
    added: int


@dataclass
class Case:
    """One captured graph and the program that it holds."""

    graph: Any
    parts: list[Any] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return [part for part in self.parts if isinstance(part, Group)]


class Failure(Exception):
    """Raised inside an update on purpose."""


class Machine:
    """Graphs on the device, tensors that they share, and what the tensors must hold."""

    def __init__(self, npu, random: Random) -> None:
        self.npu, self.random, self.side = npu, random, npu.stream()
        self.tensors = [torch.zeros(2, device="npu") for _ in range(TENSORS)]
        self.expected = [0.0] * TENSORS
        self.cases = [self.capture(Case(npu.graph())) for _ in range(3)]

    def program(self) -> list[Any]:
        def part() -> Any:
            if self.random.random() < 0.3:
                return Side(*self.random.sample(range(TENSORS), 2))
            count = self.random.randint(1, 3)
            return Group(
                [Fill(self.random.randrange(TENSORS), float(self.random.randint(1, 50))) for _ in range(count)]
            )

        return [part() for _ in range(self.random.randint(1, 5))]

    def capture(self, case: Case) -> Case:
        case.parts = self.program()
        with case.graph.capture():
            for part in case.parts:
                if isinstance(part, Group):
                    with self.npu.task_group() as part.handle:
                        self.issue(part.fills)
                else:
                    main = self.npu.current_stream()
                    self.side.wait_stream(main)
                    with self.npu.use(self.side):
                        self.tensors[part.doubled].mul_(2)
                    self.tensors[part.added].add_(1)
                    main.wait_stream(self.side)
        for group in case.groups:
            group.handle.issue = lambda fills=list(group.fills): self.issue(fills)
        return case

    def issue(self, fills: list[Fill]) -> None:
        for fill in fills:
            self.tensors[fill.tensor].fill_(fill.value)

    def update(self, group: Group) -> None:
        fills = [Fill(fill.tensor, float(self.random.randint(1, 50))) for fill in group.fills]
        with self.npu.task_update(group.handle):
            group.handle.issue_in_update(lambda: self.issue(fills))
        group.fills = fills

    def fail(self, group: Group) -> None:
        with pytest.raises(Failure), self.npu.task_update(group.handle):  # noqa: PT012
            self.issue([Fill(group.fills[0].tensor, -1.0)])
            raise Failure

    def run_on_host(self, case: Case) -> None:
        """The launch's effect on the tensors, with the groups' present values."""
        for part in case.parts:
            if isinstance(part, Group):
                for fill in part.fills:
                    self.expected[fill.tensor] = fill.value
            else:
                self.expected[part.doubled] *= 2
                self.expected[part.added] += 1

    def replay(self) -> None:
        case = self.random.choice(self.cases)
        case.graph.replay()
        for group in case.groups:
            self.fail(group) if self.random.random() < 0.1 else self.update(group)
        self.run_on_host(case)

    def forget_an_update(self) -> None:
        """The next wait, launch, reset or close lets the launch end with the values that were there."""
        case = self.random.choice([case for case in self.cases if case.groups] or self.cases)
        case.graph.replay()
        forgotten = self.random.choice(case.groups) if case.groups else None
        for group in case.groups:
            if group is forgotten:
                break
            self.update(group)
        self.run_on_host(case)
        way = self.random.choice(("synchronize", "replay", "reset", "close"))
        if way == "reset":
            case.graph.reset()
            self.capture(case)
        elif way == "close":
            case.graph.close()
            case.graph = self.npu.graph()
            self.capture(case)
        elif forgotten is not None:
            with pytest.raises(UpdateError, match="no update was issued"):
                self.npu.synchronize() if way == "synchronize" else case.graph.replay()

    def recapture(self) -> None:
        case = self.random.choice(self.cases)
        case.graph.reset()
        self.capture(case)

    def compare(self) -> None:
        self.npu.synchronize()
        assert [tensor.cpu().tolist() for tensor in self.tensors] == [[value] * 2 for value in self.expected]

    def close(self) -> None:
        for case in self.cases:
            case.graph.close()


def test_random_graphs(npu, runtime):
    actions = (Machine.replay,) * 6 + (Machine.compare, Machine.forget_an_update, Machine.recapture)
    for seed in range(SCHEDULES):
        random = Random(seed)
        runtime.schedule(seed, delay_us=200, percent=25)
        machine = Machine(npu, random)
        try:
            for _ in range(12):
                random.choice(actions)(machine)
            machine.compare()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        machine.close()
        assert runtime.report()["violations"] == [], f"seed {seed}"

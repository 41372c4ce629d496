"""Captured work that repeats by itself: what a launch runs, on a GPU.

Each check is a function that also runs on a deliberately broken version of the code, where it must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured_updates import stalled

from specgraph.device import Platform
from specgraph.errors import CaptureError


@pytest.fixture
def repeating(platform: Platform) -> Iterator[Platform]:
    if not platform.capabilities.conditional_nodes:
        pytest.skip(platform.capabilities.conditional_nodes.reason)
    yield platform
    platform.synchronize()


class Count:
    """x = 2 x + step, `left` times and at least once, through memory of the graph's pool."""

    def __init__(self, platform: Platform) -> None:
        device = platform.device
        self.platform, self.left = platform, torch.zeros(1, dtype=torch.int32, device=device)
        self.x, self.step = (torch.zeros(5, dtype=torch.int64, device=device) for _ in range(2))
        self._body()
        platform.synchronize()
        self.x.zero_()
        self.graph = platform.graph()
        with self.graph.capture(repeat_while=self.left):
            self._body()
        self.launch(1, 0)  # loads what a launch needs

    def _body(self) -> None:
        self.x.copy_(self.x * 2 + self.step)
        self.left.sub_(1).clamp_(min=0)

    def launch(self, left: int, step: int) -> None:
        """Write both and launch, all in stream order."""
        self.left.fill_(left)
        self.step.fill_(step)
        self.graph.replay()


def queued_launches_repeat(platform: Platform) -> None:
    """Launches queued behind each other run as often as the value says when each begins, without the host."""
    made, seen, expected, x = Count(platform), [], [], 0
    asked = [(3, 1), (1, 7), (0, 2), (5, -1), (2, 0)]
    with stalled():
        for left, step in asked:
            made.launch(left, step)
            seen.append(made.x.clone())
    for left, step in asked:
        for _ in range(max(left, 1)):
            x = 2 * x + step
        expected.append([x] * 5)
    platform.synchronize()
    assert [each.tolist() for each in seen] == expected
    made.graph.close()


def a_value_of_another_launch_does_not_count(platform: Platform) -> None:
    """A launch whose value was 0 at its end leaves nothing behind that ends, or prolongs, the next one."""
    first, second = Count(platform), Count(platform)
    for left in (4, 1, 3):
        first.launch(left, 1)
        second.launch(left, 1)
    platform.synchronize()
    runs = 2 ** (4 + 1 + 3) - 1
    assert first.x.tolist() == second.x.tolist() == [runs] * 5
    first.graph.close()
    second.launch(2, 1)
    platform.synchronize()
    assert second.x.tolist() == [4 * runs + 3] * 5
    second.graph.close()


CHECKS = (queued_launches_repeat, a_value_of_another_launch_does_not_count)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_repeats(repeating: Platform, check: Callable[[Platform], None]) -> None:
    check(repeating)


def _runs_once(patch: pytest.MonkeyPatch) -> None:
    """The captured work is launched without its loop."""
    import specgraph_cuda.graph as module

    def launch(self: Any) -> None:
        self._graph.instantiate()
        self._graph.replay()

    patch.setattr(module.CudaGraph, "_launch", launch)


def _kept_value(patch: pytest.MonkeyPatch) -> None:
    """The node keeps its value from launch to launch."""
    import specgraph_cuda.conditional as module
    from cuda.bindings import driver

    class Driver:
        CU_GRAPH_COND_ASSIGN_DEFAULT = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

    patch.setattr(module, "cu", Driver())


@pytest.mark.parametrize("broken", [_runs_once, _kept_value], ids=lambda broken: broken.__name__)
def test_broken_loops_are_found(
    repeating: Platform, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        queued_launches_repeat(repeating)


def test_task_groups_are_refused(repeating: Platform) -> None:
    left = torch.zeros(1, dtype=torch.int32, device=repeating.device)
    with (
        pytest.raises(CaptureError, match=r"task_group\(\) in work that repeats"),
        repeating.graph().capture(repeat_while=left),
        repeating.task_group(),
    ):
        left.zero_()
    assert not repeating.is_capturing()

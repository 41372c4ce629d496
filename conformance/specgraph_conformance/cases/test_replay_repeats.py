"""Captured work that repeats while a value on the device is not 0, and streams beside a capture."""

from __future__ import annotations

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, on_host


@pytest.mark.parametrize("times", [1, 2, 9])
@case(
    "replay.repeats-while-not-zero",
    "Work captured with `repeat_while` runs once, and again as long as the value is not 0 after it, in each replay.",
    hazard="repeats-another-number",
    needs=("conditional_nodes",),
    cause="the value is tested before the first run, a limit on the number of runs, or a value of the replay before",
)
def test_repeats(platform: Platform, times: int) -> None:
    runs = torch.zeros(1, dtype=torch.int32, device=platform.device)
    left, again = torch.zeros_like(runs), torch.zeros_like(runs)

    def body() -> None:
        runs.add_(1)
        left.sub_(1)
        again.copy_(left)

    graph = captured(platform, body, repeat_while=again)
    total = int(on_host(runs))
    for number, wanted in enumerate((times, 1, times)):
        left.fill_(wanted)
        again.fill_(number % 2)  # what the replay finds here must not matter
        graph.replay()
        platform.synchronize()
        total += wanted
        assert int(on_host(runs)) == total, (
            f"replay {number} ran {int(on_host(runs)) - total + wanted} times of {wanted}"
        )
    graph.reset()
    with graph.capture():
        body()
    left.fill_(5)
    graph.replay()
    platform.synchronize()
    assert int(on_host(runs)) == total + 1, "work captured again, without a value, still repeats"
    graph.close()


@case(
    "capture.other-streams-do-not-capture",
    "While one stream is captured, `is_capturing` is true for it, and false for a stream that takes no part.",
    cause="is_capturing asks whether any capture is under way instead of the current stream",
)
def test_other_stream(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)
    side, graph = platform.stream(), platform.graph()
    platform.synchronize()
    with graph.capture():
        x.add_(1)
        inside = platform.is_capturing()
        with platform.use(side):
            beside = platform.is_capturing()
    platform.synchronize()
    graph.close()
    assert (inside, beside) == (True, False)

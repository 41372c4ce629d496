"""Graphs that nobody closed, which the garbage collector may drop at any time: also around another graph's update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_equal
from specgraph_conformance.task_rig import Tasks, replayed


def _collectable(platform: Platform) -> tuple[list[Tasks], Callable[[], None]]:
    """A graph with task groups, and what drops the last reference to it and lets the collector find it."""
    made = [Tasks(platform)]

    def drop() -> None:
        if made:
            gone, cycle = weakref.ref(made[0].graph), [made.pop()]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
            gc.collect()
            assert gone() is None, "something keeps a graph that nobody uses"

    return made, drop


@pytest.mark.parametrize("when", ["between", "behind", "inside"])
@case(
    "task_update.a-graph-is-dropped-meanwhile",
    "A graph that nobody closed may be collected between another graph's launch and its update, also where its own "
    "launch is queued behind that one, or inside the update: the update takes effect, and nothing hangs.",
    hazard="dropped-graph-in-an-update",
    cause="releasing a graph frees memory or waits for the device at once: in a capture or an update that ends the "
    "process, and behind a launch that waits for its update it never ends. Put the release off until neither is open",
    needs=("task_update",),
    timeout=60,
)
def test_dropped(platform: Platform, tasks: Tasks, when: str) -> None:
    first, second = tasks.lengths([3, 17, 40]), tasks.lengths([50, 5, 31])
    tasks.replay(first)
    made, drop = _collectable(platform)
    made[0].replay(first)
    platform.synchronize()
    with replayed(platform, tasks.graph):
        if when == "behind":
            made[0].replay(second)
        if when != "inside":
            drop()
        tasks.update_steps(second, during=drop)
    expect_equal(tasks.result(), tasks.eager(second), "an update while another graph was collected")
    tasks.replay(first)
    expect_equal(tasks.result(), tasks.eager(first), "the update after that")

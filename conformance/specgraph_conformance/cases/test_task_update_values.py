"""The values of a task update: how large they may be, how many rows, and what an update that failed leaves."""

from __future__ import annotations

import pytest
from specgraph.attention import HostLengths
from specgraph.device import Platform
from specgraph.errors import SpecgraphError, UpdateError

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_equal
from specgraph_conformance.task_rig import Tasks, expect_waiting


@case(
    "task_update.lengths-of-many-keys",
    "Lengths above 32,767 reach a captured op as they are.",
    hazard="update-in-16-bits",
    cause="the parameter block of a captured op keeps lengths in 16 bits",
    needs=("task_update",),
)
def test_many_keys(platform: Platform) -> None:
    tasks = Tasks(platform, blocks=2100)
    lengths = tasks.lengths([33_000, 5, 32_768])
    tasks.replay(lengths)
    expect_equal(tasks.result(), tasks.eager(lengths), "attention over more than 32,767 keys")


@case(
    "task_update.rows-of-requests-change",
    "An update rewrites how many rows each request has, too, or is refused and changes nothing.",
    hazard="update-of-one-list",
    cause="an update rewrites the lengths of contexts and keeps the numbers of rows that were captured",
    needs=("task_update",),
)
def test_rows(tasks: Tasks) -> None:
    for query_lens, seq_lens in (([1, 2, 0], [3, 17, 0]), ([0, 1, 2], [0, 40, 9]), ([3, 0, 0], [5, 0, 0])):
        lengths = {0: HostLengths(query_lens, seq_lens)}
        try:
            tasks.replay(lengths)
        except UpdateError:
            if tasks.platform.capabilities.update_order == "during_replay":
                raise  # the replay waits for these values
            continue
        expect_equal(tasks.result(), tasks.eager(lengths), f"attention over {query_lens} rows")
    lengths = tasks.lengths([9, 31, 2])
    tasks.replay(lengths)
    expect_equal(tasks.result(), tasks.eager(lengths), "attention over the rows of the capture, after the others")


@case(
    "task_update.failed-update-opens-no-gate",
    "After an update whose block raised, a replay without another is an error or waits; the next whole round is right. "
    "A replay that waited for the failed update ends with the values of the one before.",
    hazard="failed-update-opens-gate",
    cause="the gate is opened in a finally, or before the update is known to be whole",
    needs=("task_update",),
    timeout=30,
)
def test_failed_update(platform: Platform) -> None:
    tasks = Tasks(platform, steps=2)
    first, second = tasks.lengths([3, 17, 40], [4, 18, 41]), tasks.lengths([50, 5, 31], [51, 6, 32])
    tasks.replay(first)
    tasks.result()
    if platform.capabilities.update_order == "during_replay":
        tasks.graph.replay()  # the launch goes on when its updates have failed
    for task in tasks.tasks:
        with pytest.raises(ZeroDivisionError), platform.task_update(task.group):
            task.prepare(second[task.key.step])()
            raise ZeroDivisionError
    platform.synchronize()
    if platform.capabilities.update_order == "before_replay":
        done = platform.event()
        try:
            tasks.graph.replay()
            done.record()
        except SpecgraphError:
            pass
        else:
            expect_waiting(done, "the graph ran after an update that failed")
            tasks.plan.apply(first)
    else:
        expect_equal(tasks.result(), tasks.eager(first), "the launch that waited for a failed update")
    tasks.replay(second)
    expect_equal(tasks.result(), tasks.eager(second), "the round after a failed update")

"""The values of a task update, groups of several captured ops, and graphs that are garbage-collected meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from specgraph import ops
from specgraph.attention import HostLengths, PagedHostAttention
from specgraph.device import Platform
from specgraph.errors import SpecgraphError, UpdateError
from torch import Tensor

from specgraph_conformance.case import Absent, case
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.task_rig import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    KV_HEADS,
    REQUESTS,
    Tasks,
    expect_waiting,
    host_attention,
    replayed,
)


def _collectable(platform: Platform) -> tuple[list[Tasks], Callable[[], None]]:
    """Return a graph with task groups, and a function that drops its last reference in a cycle and collects it."""
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


NEEDS = ("task_update",)
SCALE = DIM**-0.5


class Ops:
    """Attention ops with host lengths, captured in one task group. Each op has its own cache."""

    def __init__(self, platform: Platform, count: int) -> None:
        """
        Raises:
            Absent: the platform has its own attention with host lengths.
        """
        if not isinstance(host_attention(platform), PagedHostAttention):
            raise Absent("attention of the device's own issues one op per task group")
        self.platform, device, generator = platform, platform.device, torch.Generator().manual_seed(17)
        self.query = torch.randn(REQUESTS, HEADS, DIM, generator=generator).to(device)
        shape = (1 + REQUESTS * BLOCKS, BLOCK, KV_HEADS, DIM)
        self.caches = [torch.randn(shape, generator=generator).to(device) for _ in range(count)]
        self.table = torch.arange(1, 1 + REQUESTS * BLOCKS, dtype=torch.int32).view(REQUESTS, BLOCKS).to(device)
        self.out = torch.zeros(count, REQUESTS, HEADS, DIM, device=device)
        inert = [[1] * REQUESTS] * count
        self.issue(inert)
        platform.synchronize()
        self.graph = platform.graph()
        with self.graph.capture(), platform.task_group() as self.group:
            self.issue(inert)

    def issue(self, lengths: Sequence[Sequence[int]], scale: float = SCALE) -> None:
        """Issue one op per list of key counts."""
        for cache, rows, seq_lens in zip(self.caches, self.out, lengths, strict=True):
            given = self.query, ops.KVCache(cache, cache), self.table, ops.HostLengths([1] * REQUESTS, list(seq_lens))
            ops.paged_attention_host(*given, ops.Mask(), scale=scale, out=rows)

    def replay(self, lengths: Sequence[Sequence[int]], scale: float = SCALE) -> Tensor:
        """Update and replay in the platform's order, and return the result.

        Raises:
            UpdateError: the platform can't rewrite these values.
        """
        with replayed(self.platform, self.graph), self.platform.task_update(self.group):
            self.issue(lengths, scale)
        self.platform.synchronize()
        return on_host(self.out)

    def expect_eager(self, seen: Tensor, lengths: Sequence[Sequence[int]], scale: float, what: str) -> None:
        """Check that each op gave the bits of eager."""
        self.issue(lengths, scale)
        self.platform.synchronize()
        for number, (mine, eager) in enumerate(zip(seen, on_host(self.out), strict=True)):
            expect_equal(mine, eager, f"op {number} of the {len(seen)} in the group, after {what}")


def _of_each(count: int, step: int) -> list[list[int]]:
    """Return key counts that differ between all ops and requests of an update."""
    keys = BLOCK * BLOCKS
    return [[1 + (step + 7 * op + 23 * request) % keys for request in range(REQUESTS)] for op in range(count)]


@pytest.mark.parametrize("count", [3, 18])
@case(
    "task_update.ops-of-a-group",
    "An update rewrites every op of a group, each with its own lengths.",
    hazard="group-partly-rewritten",
    cause="task_update() rewrites the first or the last op of the group only, or a table of fixed size is too short",
    needs=NEEDS,
)
def test_several_ops(platform: Platform, count: int) -> None:
    ops = Ops(platform, count)
    for step in (0, 29):
        lengths = _of_each(count, step)
        ops.expect_eager(ops.replay(lengths), lengths, SCALE, "the update")


@case(
    "task_update.numbers-besides-lengths",
    "An update rewrites the other host numbers of an op too (here its scale), or is refused and changes nothing.",
    hazard="update-of-lengths-only",
    cause="task_update() takes the lists of an op and keeps its other arguments, or its keyword arguments, as captured",
    needs=NEEDS,
)
def test_scale(platform: Platform) -> None:
    ops = Ops(platform, 2)
    for step, scale in ((0, SCALE), (11, 3 * SCALE), (31, SCALE)):
        lengths = _of_each(2, step)
        try:
            seen = ops.replay(lengths, scale)
        except UpdateError:
            assert scale != SCALE, "an update of lengths alone is refused"
            if platform.capabilities.update_order == "during_replay":  # the replay waits for an update
                with platform.task_update(ops.group):
                    ops.issue(lengths)
                platform.synchronize()
            continue
        ops.expect_eager(seen, lengths, scale, f"an update with {scale / SCALE:g} times the captured scale")


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
        tasks.graph.replay()  # the launch goes on after its updates have failed
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


@case(
    "task_update.failed-update-keeps-the-one-before",
    "An update that fails after a good one, which no replay has used yet, leaves the good one as it is. Where replays "
    "wait for their updates, none is left for later.",
    hazard="failed-update-drops-the-pending-one",
    cause="an update throws away the pending values, or closes their gate, before its own are known to be whole",
    needs=("task_update",),
)
def test_failed_behind_good(tasks: Tasks) -> None:
    if tasks.platform.capabilities.update_order == "during_replay":
        return
    (task,) = tasks.tasks
    good, bad = tasks.lengths([3, 17, 40]), tasks.lengths([50, 5, 31])
    tasks.plan.apply(good)
    with pytest.raises(ZeroDivisionError), tasks.platform.task_update(task.group):
        task.prepare(bad[0])()
        raise ZeroDivisionError
    tasks.graph.replay()
    expect_equal(tasks.result(), tasks.eager(good), "the replay after a good update and one that failed")

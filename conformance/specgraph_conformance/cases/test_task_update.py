"""Host lengths of captured ops, rewritten between replays: an update has its full effect, in order, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph.attention import HostLengths
from specgraph.device import Platform
from specgraph.errors import SpecgraphError, UnsupportedError, UpdateError

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_equal, expect_refusal, on_host
from specgraph_conformance.task_rig import REQUESTS, Tasks, expect_waiting, replayed

NEEDS = ("task_update",)


@case(
    "task_update.refused-if-absent",
    "Without the capability, task_group() and task_update() are UnsupportedErrors with its reason.",
    cause="the methods are overridden although Capabilities.task_update says no",
    unless=("task_update",),
    quick=True,
)
def test_absent(platform: Platform) -> None:
    support = platform.capabilities.task_update
    for make in (platform.task_group, lambda: platform.task_update(object())):
        with pytest.raises(UnsupportedError) as caught:
            make()
        assert support.reason in str(caught.value)


@case(
    "task_update.takes-effect",
    "Each replay uses the lengths of the update before it, as eager attention does, and nothing of those before.",
    hazard="update-dropped",
    cause="the update is recorded and never reaches the captured task; its event was reset before its first record; or "
    "an update is merged into the previous one instead of replacing it",
    needs=NEEDS,
    quick=True,
)
def test_takes_effect(platform: Platform) -> None:
    tasks = Tasks(platform, steps=9)
    for seq_lens in ([3, 17, 40], [64, 64, 64], [1, 0, 2], [64, 1, 16]):
        lengths = tasks.lengths(*([(n + 7 * step) % 65 for n in seq_lens] for step in range(tasks.steps)))
        tasks.replay(lengths)
        expect_equal(tasks.result(), tasks.eager(lengths), "attention after an update of its lengths")


@case(
    "task_update.missing-is-not-silent",
    "A replay without an update is an error, or waits at its gate until one comes; it never runs with old lengths.",
    hazard="update-missing",
    cause="the gate is open by default: record the event only in task_update, and reset it in the graph",
    needs=NEEDS,
    timeout=30,
)
def test_missing(platform: Platform, tasks: Tasks) -> None:
    first, second = tasks.lengths([3, 17, 40]), tasks.lengths([50, 5, 31])
    tasks.replay(first)
    tasks.result()
    done = platform.event()
    try:
        tasks.graph.replay()
        done.record()
    except SpecgraphError:
        tasks.replay(second)
    else:
        expect_waiting(done, "the graph ran without an update")
        tasks.plan.apply(second)
    expect_equal(tasks.result(), tasks.eager(second))


@pytest.mark.parametrize("left_out", [0, 1, 2], ids=["first", "middle", "last"])
@case(
    "task_update.each-group-is-gated",
    "With three groups of which two were updated, a replay is an error or waits for the third; it never runs with the "
    "third one's old lengths.",
    hazard="one-group-not-gated",
    cause="only the first or the last group of a graph is gated: each needs a gate of its own",
    needs=NEEDS,
    timeout=30,
)
def test_each_gated(platform: Platform, left_out: int) -> None:
    tasks = Tasks(platform, steps=3)
    first = tasks.lengths([3, 17, 40], [4, 18, 41], [5, 19, 42])
    second = tasks.lengths([50, 5, 31], [51, 6, 32], [52, 7, 33])
    tasks.replay(first)
    tasks.result()
    done = platform.event()
    try:
        with replayed(platform, tasks.graph):
            tasks.update_steps({step: lengths for step, lengths in second.items() if step != left_out})
        done.record()
    except SpecgraphError:
        tasks.replay(second)
    else:
        expect_waiting(done, f"the graph ran although group {left_out} of 3 had no update")
        tasks.update_steps({left_out: second[left_out]})
    expect_equal(tasks.result(), tasks.eager(second), "the replay after the missing update")


@pytest.mark.parametrize("wrong", ["unknown", "misspelt", "missing", "short", "long", "negative"])
@case(
    "task_update.updates-are-strict",
    "An update with an unknown, misspelt or missing step, or with lengths that don't have one entry per padded request "
    "or have a negative one, is an UpdateError, and nothing is rewritten.",
    hazard="update-key-ignored",
    cause="values are matched to captured ops, or lengths to requests, by position, with a default, or cut by a zip",
    needs=NEEDS,
    quick=True,
)
def test_strict(tasks: Tasks, wrong: str) -> None:
    good = tasks.lengths([3, 17, 40])
    wrong_lengths = {"short": [3, 17], "long": [3, 17, 40, 1], "negative": [3, -1, 40]}.get(wrong, [])
    bad: dict[Any, HostLengths] = {"unknown": {**good, 1: good[0]}, "misspelt": {"0": good[0]}, "missing": {}}.get(
        wrong, {0: HostLengths([1] * len(wrong_lengths), wrong_lengths)}
    )
    expect_refusal(lambda: tasks.plan.apply(bad), f"the update {bad}", "", (UpdateError,))
    lengths = tasks.lengths([9, 8, 7])
    tasks.replay(lengths)
    expect_equal(tasks.result(), tasks.eager(lengths))


@case(
    "task_update.many-groups",
    "Eight steps of three layers in one graph each use the lengths of their own step.",
    hazard="per-step-lengths-not-updated",
    cause="one handle or event shared by several groups, or lengths taken from step 0 for all",
    needs=NEEDS,
)
def test_many(platform: Platform) -> None:
    tasks = Tasks(platform, steps=8, layers=3)
    assert len(tasks.tasks) == 24
    for offset in (0, 13):
        lengths = tasks.lengths(*([offset + step + 1, 2 * step + 1, 40 + step] for step in range(8)))
        tasks.replay(lengths)
        expect_equal(tasks.result(), tasks.eager(lengths))


@case(
    "task_update.rounds-need-no-host-wait",
    "Rounds issued back to back, without a synchronise between them, each use their own lengths.",
    hazard="update-before-previous-replay-ends",
    cause="nothing orders an update after the previous replay on the device",
    needs=NEEDS,
    timeout=60,
)
def test_back_to_back(platform: Platform) -> None:
    tasks = Tasks(platform, steps=2)
    generator = torch.Generator().manual_seed(5)
    rounds = [tasks.lengths(*torch.randint(1, 64, (2, REQUESTS), generator=generator).tolist()) for _ in range(70)]
    log = torch.zeros(len(rounds), *tasks.out.shape, dtype=tasks.out.dtype, device=platform.device)
    for i, lengths in enumerate(rounds):
        tasks.replay(lengths)
        log[i].copy_(tasks.out)
    platform.synchronize()
    seen = on_host(log)
    for i, lengths in enumerate(rounds):
        expect_equal(seen[i], tasks.eager(lengths), f"round {i}")


@case(
    "task_update.two-graphs-in-turns",
    "Rounds of two graphs, as of a target and its drafter, issued back to back without a host wait, each use their own "
    "lengths.",
    hazard="second-update-stream-deadlocks",
    cause="updates of two graphs on streams of their own that wait for each other's launches: use one update stream",
    needs=NEEDS,
    timeout=60,
)
def test_in_turns(platform: Platform) -> None:
    both = [Tasks(platform), Tasks(platform, steps=2)]
    rounds = [
        [tasks.lengths(*([3 + i, 40 - i, 17 + s] for s in range(tasks.steps))) for tasks in both] for i in range(9)
    ]
    logs = [torch.zeros(len(rounds), *tasks.out.shape).to(tasks.out) for tasks in both]
    platform.synchronize()
    with platform.use(platform.stream()):  # here only a wait can make replays run before the next update
        for number, lengths in enumerate(rounds):
            for tasks, log, mine in zip(both, logs, lengths, strict=True):
                tasks.replay(mine)
                log[number].copy_(tasks.out)
    platform.synchronize()
    for tasks, log, which in zip(both, map(on_host, logs), (0, 1), strict=True):
        for number, lengths in enumerate(rounds):
            expect_equal(log[number], tasks.eager(lengths[which]), f"round {number} of graph {which}")


@case(
    "task_update.graphs-have-their-own",
    "Two graphs of one size, updated in turn, don't see each other's lengths.",
    hazard="update-prefill-decode-mixed",
    cause="captured tasks are kept in a table by size instead of by graph",
    needs=NEEDS,
)
def test_two_graphs(platform: Platform) -> None:
    one, other = Tasks(platform), Tasks(platform)
    assert len(one.tasks) == len(other.tasks) == 1
    a, b = one.lengths([3, 17, 40]), one.lengths([60, 2, 9])
    one.replay(a)
    other.replay(b)
    seen_one, seen_other = one.result(), other.result()
    expect_equal(seen_one, one.eager(a))
    expect_equal(seen_other, other.eager(b))


@case(
    "task_update.other-op-refused",
    "An update that issues another op than the captured one is an UpdateError; the captured one stays.",
    cause="task_update() doesn't compare what is issued with the group",
    needs=NEEDS,
)
def test_other_op(platform: Platform) -> None:
    x = torch.ones(8, device=platform.device)
    tasks = Tasks(platform)
    group = tasks.tasks[0].group
    with pytest.raises(UpdateError), platform.task_update(group):
        x.add_(1)
    lengths = tasks.lengths([5, 6, 7])
    tasks.replay(lengths)
    expect_equal(tasks.result(), tasks.eager(lengths))


@case(
    "task_update.closed-graph-refused",
    "Updating a group of a closed graph is an UpdateError.",
    cause="the group outlives its graph and writes into freed tasks",
    needs=NEEDS,
)
def test_closed(tasks: Tasks) -> None:
    tasks.graph.close()
    with pytest.raises(SpecgraphError):
        tasks.plan.apply(tasks.lengths([3, 17, 40]))

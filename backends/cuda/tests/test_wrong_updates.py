"""Updates that are refused, and what they leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_updates import HostAttention, Stored, one_group_each

from specgraph.device import Platform
from specgraph.errors import CaptureError, UpdateError


def test_an_update_of_attention_on_other_tensors_is_refused(updating: Platform) -> None:
    made, other = HostAttention(updating, [1, 1]), HostAttention(updating, [1, 1])
    with pytest.raises(UpdateError, match="same tensors"), updating.task_update(made.group):
        other._attend([3, 4])
    ragged = HostAttention(updating, [2, 2])
    ragged.query_lens = [1, 3]
    with pytest.raises(UpdateError, match="equal rows"), updating.task_update(ragged.group):
        ragged._attend([3, 4])
    made.replay([5, 6])
    updating.synchronize()
    assert torch.equal(made.out, made.with_device_lengths([5, 6]))
    for one in (made, other, ragged):
        one.graph.close()


def test_updates_of_one_batch_are_all_made_or_none(updating: Platform) -> None:
    x = torch.zeros(3, device=updating.device)
    parts = list(x.unbind())
    graph, groups = one_group_each(updating, parts, lambda part: part.fill_(1.0))

    def update(number: int, value: float) -> None:
        with updating.task_update(groups[number]):
            parts[number].fill_(value)

    def two_of_three_then(broken: Callable[[], object]) -> None:
        with updating.batch_task_updates():
            update(0, 7.0)
            update(1, 8.0)
            broken()

    def wrong_op() -> None:
        with updating.task_update(groups[2]):
            parts[2].mul_(9.0)

    def swallowed() -> None:
        with contextlib.suppress(UpdateError):
            wrong_op()

    def failing() -> None:
        raise KeyError("mine")

    def stray_work() -> None:
        x.add_(100.0)

    before = updating.counts()["task_updates"]
    for broken, error in (
        (wrong_op, UpdateError),
        (swallowed, UpdateError),
        (failing, KeyError),
        (stray_work, UpdateError),
    ):
        with pytest.raises(error):
            two_of_three_then(broken)
    with pytest.raises(UpdateError, match="has had no update"):
        graph.replay()
    assert updating.counts()["task_updates"] == before
    two_of_three_then(lambda: update(2, 9.0))
    graph.replay()
    updating.synchronize()
    assert x.tolist() == [7.0, 8.0, 9.0]
    assert updating.counts()["task_updates"] == before + 3
    graph.close()


def test_a_wrong_update_changes_nothing(updating: Platform) -> None:
    made = Stored(updating)
    made.replay(1, 2)

    def failing() -> None:
        made.store(7, 7)
        raise KeyError("mine")

    with pytest.raises(UpdateError, match="other than the captured"), updating.task_update(made.group):
        made.total.mul_(3)
    with pytest.raises(UpdateError, match="issued 2 nodes"), updating.task_update(made.group):
        made.total.add_(1).add_(1)
    with pytest.raises(UpdateError, match="issued 0 nodes"), updating.task_update(made.group):
        pass
    with pytest.raises(KeyError, match="mine"), updating.task_update(made.group):
        failing()
    with pytest.raises(UpdateError, match="can't be captured again"), updating.task_update(made.group):
        made.total.sum().item()
    side = updating.stream()

    def fork() -> None:
        side.wait_stream(updating.current_stream())
        with updating.use(side):
            made.total.add_(1)
        made.x.add_(1)
        updating.current_stream().wait_stream(side)

    with pytest.raises(UpdateError, match="one stream"), updating.task_update(made.group):
        fork()
    with pytest.raises(UpdateError, match="has had no update"):
        made.graph.replay()
    made.replay(3, 4)
    updating.synchronize()
    assert made.total.tolist() == [4, 6]
    made.graph.close()
    with pytest.raises(UpdateError, match="closed or reset"), updating.task_update(made.group):
        made.store(1, 1)


def test_what_a_group_may_not_hold(updating: Platform) -> None:
    x = torch.zeros(4, device=updating.device)
    with pytest.raises(CaptureError, match="outside of a capture"), updating.task_group():
        pass
    side = updating.stream()
    graph = updating.graph()

    def fork() -> None:
        x.add_(1)
        side.wait_stream(updating.current_stream())
        with updating.use(side):
            y = x + 1
        x.add_(1)
        updating.current_stream().wait_stream(side)
        x.add_(y)

    with pytest.raises(CaptureError, match="one stream"), graph.capture(), updating.task_group():
        fork()
    with pytest.raises(CaptureError, match="nest"), graph.capture(), updating.task_group(), updating.task_group():
        pass
    with graph.capture():
        x.add_(1)
    graph.replay()
    updating.synchronize()
    assert x.tolist() == [1.0] * 4
    graph.close()


def test_a_refusal_half_way_breaks_the_graph_with_one_error(
    updating: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specgraph_cuda.task_update import nodes

    x = torch.zeros(2, device=updating.device)
    x.add_(1).zero_()
    graph = updating.graph()
    with graph.capture(), updating.task_group() as group:
        x.add_(1)
        x.add_(2)
    real, done = nodes.rewrite, []

    def refuse(*arguments: Any) -> None:
        if done:
            raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")
        done.append(real(*arguments))

    def update() -> None:
        with updating.task_update(group):
            x.add_(10)
            x.add_(20)

    with monkeypatch.context() as patch:
        patch.setattr(nodes, "rewrite", refuse)
        with pytest.raises(UpdateError, match="refused to rewrite node 1"):
            update()
    update()
    with pytest.raises(UpdateError, match="capture it again"):
        graph.replay()
    graph.reset()
    with graph.capture():
        x.add_(5)
    graph.replay()
    assert x.tolist() == [5.0, 5.0]
    graph.close()

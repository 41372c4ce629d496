"""Work that repeats while a value on the device is not 0, against a Python loop; and what it may not hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specgraph.device.cpu import CpuPlatform
from specgraph.device.graph import Graph
from specgraph.errors import CaptureError, UnsupportedError

PLATFORM = CpuPlatform()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=1, max_size=4))
def test_runs_like_a_do_while_loop(launches):
    left, total, runs = int32(0), torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    step = torch.zeros(1, dtype=torch.int64)
    graph = PLATFORM.graph()
    with graph.capture(repeat_while=left):
        squares = (total + step) * 2  # memory of the pool, written anew in each run
        total.copy_(squares)
        runs.add_(1)
        left.sub_(1).clamp_(min=0)
    expected, count = 0, 0
    for repeats, add in launches:
        left.fill_(repeats)
        step.fill_(add)
        graph.replay()
        while True:
            expected, count, repeats = (expected + add) * 2, count + 1, max(repeats - 1, 0)
            if not repeats:
                break
        assert (total.tolist(), runs.item(), left.item()) == ([expected] * 3, count, 0)
    graph.close()


def test_a_graph_that_is_captured_again_runs_once():
    left, runs, graph = int32(3), torch.zeros(1), PLATFORM.graph()
    with graph.capture(repeat_while=left):
        left.sub_(1)
    graph.replay()
    assert left.item() == 0
    graph.reset()
    left.fill_(3)
    with graph.capture():
        runs.add_(1)
    graph.replay()
    assert (left.item(), runs.item()) == (3, 1)
    graph.close()


def test_what_repeats_must_write_its_condition_and_hold_no_events_or_task_groups():
    left, x = int32(1), torch.zeros(2)
    with pytest.raises(CaptureError, match="never writes repeat_while"), PLATFORM.graph().capture(repeat_while=left):
        x.add_(1)
    with pytest.raises(CaptureError, match="in work that repeats"), PLATFORM.graph().capture(repeat_while=left):
        PLATFORM.event(external=True).record()
    with (
        pytest.raises(CaptureError, match=r"task_group\(\) in work that repeats"),
        PLATFORM.graph().capture(repeat_while=left),
        PLATFORM.task_group(),
    ):
        x.add_(1)
    for wrong in (torch.zeros(1), int32(1, 2)):
        with pytest.raises(CaptureError, match="give one int32"), PLATFORM.graph().capture(repeat_while=wrong):
            x.add_(1)
    assert x.tolist() == [0, 0]


def test_other_platforms_refuse_with_their_reason(monkeypatch):
    monkeypatch.setattr("specgraph.device.cpu.graph.CpuGraph._can_repeat", Graph._can_repeat)
    with (
        pytest.raises(UnsupportedError, match="'cpu' captures no work that repeats by itself: "),
        PLATFORM.graph().capture(repeat_while=int32(1)),
    ):
        pass

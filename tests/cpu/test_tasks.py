"""Task groups: host parameters baked at capture, rewritten between replays, strictly."""

# ruff: noqa: PT012, SIM117  (a capture or update raises from its body or at its end: both belong in the block)
from __future__ import annotations

import contextlib
import sys
from itertools import count

import pytest
import torch
from torch.utils import _python_dispatch

from specgraph.cpu import graph as cpu_graph
from specgraph.cpu import platform as cpu_platform
from specgraph.cpu import tasks
from specgraph.errors import CaptureError, UpdateError


@torch.library.custom_op("specgraph_test::masked_sum", mutates_args={"out"})
def masked_sum(x: torch.Tensor, lengths: list[int], out: torch.Tensor) -> None:
    for row, length in enumerate(lengths):
        out[row] = x[row, :length].sum()


class Captured:
    """x -> out by lengths, twice; `scaled` shows that the graph goes on after the group."""

    def __init__(self, platform):
        self.platform = platform
        self.x = torch.arange(12.0).view(3, 4)
        self.out = torch.zeros(2, 3)
        self.graph = platform.graph()
        with self.graph.capture():
            with platform.task_group() as self.group:
                masked_sum(self.x, [1, 1, 1], self.out[0])
            with platform.task_group() as self.second:
                masked_sum(self.x, [2, 2, 2], self.out[1])
            self.scaled = self.out * 10

    def update(self, group, lengths, row):
        with self.platform.task_update(group):
            masked_sum(self.x, lengths, self.out[row])

    def expected(self, *lengths):
        return torch.tensor([[self.x[r, :n].sum() for r, n in enumerate(ns)] for ns in lengths])


@pytest.fixture
def captured(platform):
    return Captured(platform)


def test_update_runs_nothing_by_itself(captured):
    captured.update(captured.group, [4, 4, 4], 0)
    assert captured.out.sum() == 0


def test_last_update_wins(captured):
    c = captured
    c.update(c.second, [1, 1, 1], 1)
    c.update(c.group, [1, 1, 1], 0)
    c.update(c.group, [3, 3, 3], 0)
    c.graph.replay()
    assert torch.equal(c.out, c.expected([3, 3, 3], [1, 1, 1]))


@pytest.mark.parametrize("updated", [0, 1])
def test_each_group_needs_an_update_of_its_own(captured, updated):
    c = captured
    c.update((c.group, c.second)[updated], [4, 4, 4], updated)
    with pytest.raises(UpdateError, match=f"task group {1 - updated} .* had no update"):
        c.graph.replay()
    c.update((c.group, c.second)[1 - updated], [3, 3, 3], 1 - updated)
    c.graph.replay()
    assert torch.equal(c.out[updated], c.expected([4, 4, 4])[0])


@pytest.mark.parametrize("end", ["close", "reset"])
def test_groups_end_with_the_capture(captured, end):
    getattr(captured.graph, end)()
    for group in (captured.group, captured.second):
        with pytest.raises(UpdateError, match="belongs to no captured graph"):
            captured.update(group, [4, 4, 4], 0)


def test_other_tensor(captured):
    c = captured
    with pytest.raises(UpdateError, match=r"tensor argument 1 .*\[3\]"):
        c.update(c.group, [1, 1, 1], 1)  # the second row of out, captured with the first
    twin = c.x.clone()
    with pytest.raises(UpdateError, match="tensor argument 0"), c.platform.task_update(c.group):
        masked_sum(twin, [1, 1, 1], c.out[0])


def test_other_op_or_count(captured):
    c = captured
    with pytest.raises(UpdateError, match=r"captured specgraph_test\.masked_sum.*issued aten\.add"):
        with c.platform.task_update(c.group):
            c.x + 1
    with pytest.raises(UpdateError, match=r"issued 0 op\(s\), 1 were captured"), c.platform.task_update(c.group):
        pass
    with pytest.raises(UpdateError, match="one more than the captured 1"), c.platform.task_update(c.group):
        masked_sum(c.x, [4, 4, 4], c.out[0])
        masked_sum(c.x, [4, 4, 4], c.out[0])


def test_numbers_of_a_plain_op_with_a_result(platform):
    x = torch.arange(4.0)
    graph = platform.graph()
    with graph.capture(), platform.task_group() as group:
        y = torch.add(x, 1.0, alpha=1)
    for number in (2.0, -3.0):
        with platform.task_update(group):
            torch.add(x, number, alpha=2)
        graph.replay()
        assert torch.equal(y, x + 2 * number)


def test_a_value_that_changes_the_results_shape(platform):
    x = torch.arange(4.0)
    graph = platform.graph()
    with graph.capture(), platform.task_group() as group:
        kept = torch.ops.aten.repeat(x, [2])
    with pytest.raises(UpdateError, match=r"\[12\].*\[8\]"), platform.task_update(group):
        torch.ops.aten.repeat(x, [3])
    assert kept.shape == (8,)


def test_a_stale_input_does_not_use_up_the_update(captured):
    from specgraph.errors import StaleInputError

    c = captured
    c.update(c.group, [1, 1, 1], 0)
    c.update(c.second, [1, 1, 1], 1)
    kept, c.x = c.x, None
    kept_view = kept.view(-1)
    del kept
    c.graph.replay()
    assert torch.equal(c.out[0], kept_view.view(3, 4)[:, 0])
    del kept_view
    with pytest.raises(StaleInputError):
        c.graph.replay()


def test_wrong_places(platform, captured):
    with pytest.raises(CaptureError, match="task_group"), platform.task_group():
        pass
    with pytest.raises(CaptureError, match="nest"), platform.graph().capture(), platform.task_group():
        with platform.task_group():
            pass
    with pytest.raises(CaptureError, match="task_update"), platform.graph().capture():
        captured.update(captured.group, [1, 1, 1], 0)


TRACED = {module.__file__ for module in (cpu_platform, tasks, contextlib, _python_dispatch)}


def interrupted(call, line, files=TRACED):
    """Raise KeyboardInterrupt at the `line`-th line that a call runs in `files`; return it, or None if it has fewer."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


def test_an_interrupt_at_any_line_of_an_update_leaves_no_mode_and_no_half_update(platform):
    x, out, graph = torch.arange(12.0).view(3, 4), torch.zeros(2, 3), platform.graph()
    with graph.capture(), platform.task_group() as group:
        masked_sum(x, [1, 1, 1], out[0])
        masked_sum(x, [1, 1, 1], out[1])

    def update(length):
        with platform.task_update(group):
            masked_sum(x, [length] * 3, out[0])
            masked_sum(x, [length] * 3, out[1])

    for line in count():
        update(1)
        if not interrupted(lambda: update(3), line):
            break
        assert torch._C._len_torch_dispatch_stack() == 0, line
        with contextlib.suppress(UpdateError):  # the group has no update any more
            graph.replay()
        assert torch.equal(out[0], out[1]), line
    assert line > 50
    graph.replay()
    assert torch.equal(out, x[:, :3].sum(1).expand(2, 3))


def test_an_interrupt_at_any_line_of_a_replay_leaves_no_mode(platform):
    """The second of two, say: the first one ends the ops, and torch's own modes are left by lines of Python."""
    files = {torch.autograd.grad_mode.__file__, cpu_graph.__file__}
    x, graph = torch.zeros(3), platform.graph()
    with graph.capture():
        x.add_(1)
    with torch.inference_mode(False):
        for line in count():
            held = interrupted(graph.replay, line, files)  # with the frames that would leave the mode when they go
            if held is None:
                break
            assert not torch.is_inference_mode_enabled(), line
            assert torch.is_grad_enabled(), line
    assert line > 5

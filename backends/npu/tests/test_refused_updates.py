"""Task updates that are begun twice, do not fit what was captured, or fail midway: one error, and what is left."""

from __future__ import annotations

import pytest
import torch
from specgraph_npu.attention import make_attention

from draft.on_platform import batches_for, make_drafter, propose
from specgraph.attention import HostLengths
from specgraph.cpu import CpuPlatform
from specgraph.errors import UpdateError


def test_group_updated_twice(npu, runtime):
    x = torch.zeros(2, device="npu")
    graph = npu.graph()
    with graph.capture(), npu.task_group() as group:
        x.fill_(1)
    graph.replay()
    with npu.task_update(group):
        x.fill_(5)
    with pytest.raises(UpdateError, match="already"), npu.task_update(group):
        x.fill_(6)
    assert x.cpu().tolist() == [5, 5]
    graph.close()


def captured_pair(npu):
    """A graph with one task group of two kernels, and the tensors that they fill."""
    x, y = torch.zeros(2, device="npu"), torch.zeros(2, device="npu")
    graph = npu.graph()
    with graph.capture(), npu.task_group() as group:
        x.fill_(1)
        y.fill_(2)
    graph.replay()
    return graph, group, x, y


def test_update_with_another_op_of_the_same_cores_is_not_refused(npu, runtime):
    """The runtime compares the cores that kernels run on: what an update issues is what the graph runs from then on."""
    graph, group, x, y = captured_pair(npu)
    with npu.task_update(group):
        x.add_(3)
        y.fill_(5)
    assert (x.cpu().tolist(), y.cpu().tolist()) == ([3, 3], [5, 5])
    graph.close()


def test_update_with_too_few_ops(npu, runtime):
    """The kernels that were issued stay rewritten; without the old values at hand, the launch computes with both."""
    graph, group, x, y = captured_pair(npu)
    with pytest.raises(UpdateError, match=r"issued 1 of 2 captured kernels.*launch 1"), npu.task_update(group):
        x.fill_(7)
    npu.synchronize()  # the launch went on instead of waiting at the gate
    assert (x.cpu().tolist(), y.cpu().tolist()) == ([7, 7], [2, 2])
    assert any("failed midway" in line for line in runtime.report()["violations"])
    runtime.reset_report()
    graph.replay()
    with npu.task_update(group):
        x.fill_(8)
        y.fill_(9)
    assert (x.cpu().tolist(), y.cpu().tolist()) == ([8, 8], [9, 9])
    graph.close()


def test_exception_in_an_update_restores_the_last_values(npu, runtime):
    """With the issue of the last values at hand (`NpuTaskGroup.issue`), a failed update is undone."""
    graph, group, x, y = captured_pair(npu)

    def issue(a, b):
        x.fill_(a)
        y.fill_(b)

    with npu.task_update(group):
        group.issue_in_update(lambda: issue(3, 4))
    graph.replay()
    with pytest.raises(ZeroDivisionError), npu.task_update(group):  # noqa: PT012
        x.fill_(7)
        1 / 0  # noqa: B018
    npu.synchronize()
    assert (x.cpu().tolist(), y.cpu().tolist()) == ([3, 3], [4, 4])
    graph.replay()
    with npu.task_update(group):
        issue(5, 6)
    assert (x.cpu().tolist(), y.cpu().tolist()) == ([5, 5], [6, 6])
    graph.close()


def test_a_failed_update_is_undone_with_the_values_before_it(npu, runtime):
    """Those of the last update that succeeded, not of the one that failed, although it kept its own already."""
    graph, group, x, y = captured_pair(npu)

    def issue(a, b):
        x.fill_(a)
        y.fill_(b)

    with npu.task_update(group):
        group.issue_in_update(lambda: issue(3, 4))
    for _ in range(2):
        graph.replay()
        with pytest.raises(ZeroDivisionError), npu.task_update(group):  # noqa: PT012
            group.issue_in_update(lambda: issue(7, 8))
            1 / 0  # noqa: B018
        npu.synchronize()
        assert (x.cpu().tolist(), y.cpu().tolist()) == ([3, 3], [4, 4])
    graph.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (HostLengths([4, 4], [4, 1000]), "sees 1000 keys; its row of the block table holds"),
        (HostLengths([4, 4], [3, 8]), "a request of 4 rows sees 3 keys"),
        (HostLengths([4, 3], [4, 8]), "are 7 rows; the op has 8"),
    ],
)
def test_lengths_that_the_op_refuses_begin_no_update(npu, runtime, wrong, why):
    """Lengths that the op of a layer refuses update none, and the next replay is as ever."""
    reference = make_drafter(CpuPlatform(), "eager", 3, layers=2)
    drafter = make_drafter(npu, "step", 3, layers=2, attention=make_attention(npu, "fia"))
    captured = next(c for d, c in drafter.graphs._captured.items() if d.num_requests == 2 and d.query_len == 4)
    npu.synchronize()
    runtime.reset_report()
    with pytest.raises(UpdateError, match=why):
        captured.updates.apply({0: wrong})
    assert not runtime.report()["calls"].get("aclmdlRICaptureTaskUpdateBegin", 0)
    batch = batches_for(reference, seed=5).next(num_requests=2)
    assert torch.equal(propose(drafter, batch), propose(reference, batch))
    drafter.close()


@pytest.mark.once
def test_update_that_can_not_be_undone_ends_the_platform(run_script):
    """The last good values can't be issued either: one error from then on, instead of launches that never end."""
    done = run_script(
        """
        import torch
        from specgraph_npu.platform import NpuPlatform
        npu, x = NpuPlatform(0), torch.zeros(2, device="npu")
        graph = npu.graph()
        with graph.capture(), npu.task_group() as group:
            x.fill_(1)
        def gone():
            raise ValueError("the tensors are gone")
        group.issue = gone
        graph.replay()
        def update():
            with npu.task_update(group):
                1 / 0
        for use in (update, update, npu.synchronize, graph.replay):
            try:
                use()
            except Exception as error:
                print(type(error).__name__, error)
        import os, sys
        sys.stdout.flush()
        os._exit(0)
        """,
        hang_seconds=3,
        TASK_QUEUE_ENABLE=0,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    message = "PlatformError an update of task group 0 of 1 failed and could not be undone: the tensors are gone"
    assert all(line.startswith(message) and line == lines[0] for line in lines), done.stdout


BROKEN = """
import torch
from specgraph_npu.platform import NpuPlatform
npu = NpuPlatform(0)
x, y, z = (torch.zeros(4, 4, device="npu") for _ in range(3))
graph = npu.graph()
with graph.capture(), npu.task_group() as group:
    x.fill_(1)
    y.fill_(2)
npu.synchronize()
graph.replay()
for attempt in range(2):
    try:
        with npu.task_update(group):
            {body}
        npu.synchronize()
    except Exception as error:
        print(type(error).__name__, error)
import os
os._exit(0)
"""


@pytest.mark.once
@pytest.mark.parametrize("queue", [0, 1])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("torch.mm(x, y, out=z); y.fill_(3)", "a cube kernel, for a captured 'aclnnInplaceFillScalar', a vector"),
        ("x.fill_(3); y.fill_(3); z.fill_(3)", "is one kernel more than the 2 of the updated task group"),
    ],
)
def test_kernel_that_the_runtime_refuses_in_an_update(run_script, body, why, queue):
    """One sentence; where torch_npu's task queue issues the kernels, it drops all later work: the platform ends."""
    done = run_script(BROKEN.format(body=body), hang_seconds=3, TASK_QUEUE_ENABLE=queue)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    if queue:
        assert len(lines) == 2
        assert all(line.startswith("PlatformError an update of task group 0") for line in lines), done.stdout
        assert all("start a new process" in line for line in lines), done.stdout
    else:
        assert lines[0].startswith("UpdateError task group 0 of 1: the update does not fit"), done.stdout
        assert why in lines[0], done.stdout


def test_closing_a_graph_that_waits_at_a_gate(npu, runtime):
    x = torch.zeros(2, device="npu")
    graph = npu.graph()
    with graph.capture(), npu.task_group():
        x.fill_(1)
    graph.replay()
    graph.close()
    npu.synchronize()

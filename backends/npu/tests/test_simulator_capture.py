"""Refusals of the simulated runtime in and around a capture, and its way to run what was captured."""

import pytest
import torch

from specgraph.errors import CaptureError


def refused(npu, work, match):
    graph = npu.graph()
    with pytest.raises(CaptureError, match=match), graph.capture():
        work()
    # the platform is usable afterwards
    assert not npu.is_capturing()
    assert (torch.ones(2, device="npu") + 1).cpu().tolist() == [2, 2]


def test_unjoined_fork(npu, runtime):
    side, x = npu.stream(), torch.zeros(4, device="npu")

    def fork_only():
        side.wait_stream(npu.current_stream())
        with npu.use(side):
            x.add_(1)

    refused(npu, fork_only, "never joined back")


def test_joined_fork_runs_in_order(npu, runtime):
    side, x, y = npu.stream(), torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    graph = npu.graph()
    with graph.capture():
        main = npu.current_stream()
        x.add_(1)
        side.wait_stream(main)
        with npu.use(side):
            y.copy_(x)
            y.mul_(10)
        main.wait_stream(side)
        x.add_(y)
    for seed in range(20):
        runtime.schedule(seed, 200, 50)
        x.zero_()
        graph.replay()
        assert x.cpu().tolist() == [11.0] * 4
    graph.close()


def test_missing_edge_shows_under_some_schedule(npu, runtime):
    """Two branches that write the same tensor: some order of the nodes must give another result."""
    side, x = npu.stream(), torch.zeros(1, device="npu")
    graph = npu.graph()
    with graph.capture():
        main = npu.current_stream()
        side.wait_stream(main)
        with npu.use(side):
            x.mul_(2)
        x.add_(3)
        main.wait_stream(side)
    results = set()
    for seed in range(40):
        runtime.schedule(seed, 100, 50)
        x.fill_(1)
        graph.replay()
        results.add(x.item())
    assert results == {5.0, 8.0}
    graph.close()


def test_missing_order_between_streams_shows(npu, runtime):
    side, seen = npu.stream(), set()
    for seed in range(40):
        runtime.schedule(seed, 300, 60)
        x = torch.zeros(1, device="npu")
        npu.synchronize()
        x.add_(1)
        with npu.use(side):
            y = x * 10  # nothing orders this behind the addition
        npu.synchronize()
        seen.add(y.item())
    assert seen == {0.0, 10.0}


def test_host_wait_in_capture(npu, runtime):
    x = torch.ones(4, device="npu")
    refused(npu, lambda: x.sum().item(), "being captured|is captured|capture")


def test_device_synchronize_in_capture(npu, runtime):
    refused(npu, lambda: torch.npu.synchronize(), "capture")


def test_pageable_copy_in_capture(npu, runtime):
    x, host = torch.ones(4, device="npu"), torch.zeros(4)
    refused(npu, lambda: x.copy_(host), "capture|pinned")


def test_exception_in_capture_leaves_the_stream_usable(npu, runtime):
    graph, before = npu.graph(), npu.current_stream()
    with pytest.raises(ZeroDivisionError), graph.capture():
        1 / 0  # noqa: B018
    assert npu.current_stream() == before
    x = torch.zeros(1, device="npu")
    with graph.capture():
        x.add_(1)
    graph.replay()
    assert x.item() == 1.0
    graph.close()


def test_group_without_an_op(npu, runtime):
    def empty_group():
        with npu.task_group():
            pass

    refused(npu, empty_group, "without a task|can't be captured")


@pytest.mark.once
def test_stream_budget(run_script):
    done = run_script(
        """
        import torch
        from specgraph_npu.platform import NpuPlatform
        from specgraph.errors import CaptureError
        npu, kept = NpuPlatform(0), []
        x = torch.zeros(1, device="npu")
        try:
            for _ in range(100):
                kept.append(npu.graph())
                with kept[-1].capture():
                    x.add_(1)
        except CaptureError as error:
            print(len(kept), error)
        """,
        streams=50,
    )
    assert "no stream left of 50" in done.stdout, done.stderr
    assert int(done.stdout.split()[0]) < 50


def test_update_of_a_closed_graph(npu, runtime):
    from specgraph.errors import UpdateError

    x = torch.zeros(2, device="npu")
    graph = npu.graph()
    with graph.capture(), npu.task_group() as group:
        x.fill_(1)
    graph.close()
    with pytest.raises(UpdateError, match="closed"), npu.task_update(group):
        x.fill_(2)

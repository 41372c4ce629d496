"""Two NPUs in one process: each keeps to its own streams, gates and graphs, whichever is current."""

from __future__ import annotations

import pytest
import torch
from specgraph_npu.attention import make_attention
from specgraph_npu.platform import NpuPlatform

from draft.on_platform import batches_for, make_drafter, propose
from specgraph.cpu import CpuPlatform


@pytest.fixture(scope="module")
def other(npu):
    """Device 1 as a platform, opened after device 0."""
    return NpuPlatform(1)


def test_opening_a_device_leaves_the_current_one(npu, other):
    assert torch.npu.current_device() == 0
    assert (npu.device.index, other.device.index) == (0, 1)


@pytest.mark.parametrize("current", [0, 1])
def test_graphs_with_task_groups(npu, other, runtime, current):
    with torch.npu.device(current):
        pairs = []
        for platform in (npu, other):
            x = torch.zeros(2, device=platform.device)
            graph = platform.graph()
            with graph.capture(), platform.task_group() as group:
                x.fill_(1)
            pairs.append((platform, x, graph, group))
        for value in range(3, 8):
            for platform, x, graph, group in pairs:
                graph.replay()
                with platform.task_update(group):
                    x.fill_(value + platform.device.index)
        for platform, x, graph, _ in pairs:
            assert x.cpu().tolist() == [7 + platform.device.index] * 2
            graph.close()


def test_drafters(npu, other, runtime):
    reference = make_drafter(CpuPlatform(), "eager", 3)
    drafters = [make_drafter(each, "merged", 3, attention=make_attention(each, "fia")) for each in (npu, other)]
    rounds = batches_for(reference, seed=11)
    for _ in range(4):
        batch = rounds.next()
        expected = propose(reference, batch)
        for drafter in drafters:
            assert torch.equal(propose(drafter, batch), expected), drafter.platform.device
    for drafter in drafters:
        drafter.close()


def test_no_stream_is_the_platforms_own(npu):
    """torch_npu hands out 32 streams in turn; a replay on one that rewrites tasks would wait for itself."""
    own = {stream.npu_stream for stream in (npu.update_stream, npu.capture_stream, npu.gate_stream, npu.copy_stream)}
    assert len(own) == 4
    assert not own & {npu.stream().npu_stream for _ in range(100)}

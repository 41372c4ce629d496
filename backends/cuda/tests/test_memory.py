"""Host memory that kernels write, eagerly and in graphs."""

from __future__ import annotations

import pytest
import torch

from specgraph.device import Platform


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_the_host_reads_what_a_graph_wrote(platform: Platform, dtype: torch.dtype) -> None:
    made = platform.mapped_memory(2051, dtype)
    assert made is not None, platform.capabilities.notes["mapped_memory"].reason
    on_device, host = made
    assert (on_device.device, host.device.type, host.is_pinned()) == (platform.device, "cpu", True)
    source = torch.arange(2051, device=platform.device).to(dtype)
    graph, event = platform.graph(), platform.event()
    on_device[1:].copy_(source[1:] + 1)
    platform.synchronize()
    with graph.capture():
        on_device[1:].copy_(source[1:] + 1)
        source.add_(1)
    for launch in range(3):
        graph.replay()
        event.record(platform.current_stream())
        event.synchronize()
        assert host[1:].tolist() == list(range(2 + launch, 2052 + launch))
    assert host[0] == 0
    graph.close()

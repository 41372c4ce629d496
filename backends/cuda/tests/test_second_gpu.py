"""GPU 1, while GPU 0 is the process's current device: what launches kernels must not rely on the current one."""

from __future__ import annotations

import pytest
import torch
from specgraph_cuda.backend import open_device, probe

from specgraph import load_generator


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if (found := probe()).device_count < 2:
        pytest.skip(found.reason or "one GPU")


@pytest.mark.parametrize("attention", ["device", "host"])
@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_it_generates_what_the_first_one_generates(lowering: str, attention: str) -> None:
    texts: list[str] = []
    for index in (0, 1):
        platform = open_device(index)
        assert torch.cuda.current_device() == 0
        assert platform.capabilities.task_update, platform.capabilities.task_update.reason
        generator = load_generator(platform=platform, lowering=lowering, attention=attention, max_num_requests=1)
        texts += generator.text("def read_chunk(self, size):\n", max_tokens=24)
        generator.close()
        platform.close()
    assert texts[0] == texts[1]


def test_work_that_repeats_is_in_order_with_the_work_around_it() -> None:
    platform = open_device(1)
    if not platform.capabilities.conditional_nodes:
        pytest.skip(platform.capabilities.conditional_nodes.reason)
    left, runs = (torch.zeros(1, dtype=torch.int32, device=platform.device) for _ in range(2))

    def body() -> None:
        runs.add_(1)
        left.sub_(1)

    body()  # loads the kernels
    platform.synchronize()
    graph = platform.graph()
    with graph.capture(repeat_while=left):
        body()
    for count in (40, 1, 2000):
        runs.zero_()
        left.fill_(count)
        graph.replay()  # on the default stream, whose handle is also that of GPU 0's
        assert torch.cuda.current_device() == 0
        assert runs.tolist() == [count]
    graph.close()
    platform.close()

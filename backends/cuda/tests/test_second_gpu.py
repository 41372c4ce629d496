"""GPU 1, while GPU 0 is the process's current device: what launches kernels must not rely on the current one."""

from __future__ import annotations

import pytest
import torch
from specgraph_cuda.backend import open_device, probe
from specgraph_run import load_generator


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
        generator = load_generator(platform=platform, decode=lowering, attention=attention, max_num_requests=1)
        texts += generator.text("def read_chunk(self, size):\n", max_tokens=24)
        generator.close()
        platform.close()
    assert texts[0] == texts[1]

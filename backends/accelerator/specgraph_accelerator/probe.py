"""The probe: whether this machine's torch has an accelerator, and graphs for it."""

from __future__ import annotations

from typing import Any

import torch
from specgraph.device import Probe
from specgraph.device.installed import calls_of, missing_names
from specgraph.errors import first_line

CALLS = calls_of(
    """
    Event(device,enable_timing=) Stream(device=) Stream.is_capturing(self) accelerator.Graph(pool=)
    accelerator.Graph.capture_begin(self) accelerator.Graph.capture_end(self) accelerator.Graph.pool(self)
    accelerator.Graph.replay(self) accelerator.Graph.reset(self) accelerator.current_accelerator()
    accelerator.current_device_index() accelerator.current_stream(device) accelerator.device_count()
    accelerator.device_index(index) accelerator.empty_cache() accelerator.get_memory_info(device)
    accelerator.is_available() accelerator.memory_allocated(device) accelerator.memory_reserved(device)
    accelerator.set_device_index(index) accelerator.set_stream(stream) accelerator.synchronize(device)
"""
)
"""The calls of this package to `torch`, by their names below it."""


def probe(module: Any = torch) -> Probe:
    """Say whether this machine has an accelerator with graphs. Runs nothing on a device and never raises.

    Args:
        module: torch, or a test's replacement for it.
    """
    versions = {"torch": str(module.__version__)}

    def refuse(reason: str) -> Probe:
        return Probe(available=False, reason=reason, versions=versions)

    if missing := missing_names(module, CALLS):
        return refuse(
            f"torch {module.__version__} lacks {missing[0]}: graphs of torch.accelerator need torch 2.12 or newer"
        )
    try:
        device = module.accelerator.current_accelerator() if module.accelerator.is_available() else None
    except Exception as error:
        return refuse(f"torch's accelerator does not answer: {first_line(error)}")
    if device is None:
        return refuse(
            "torch sees no accelerator: install the torch build for the device (https://pytorch.org/get-started), or "
            "the package with which its vendor adds it to torch"
        )
    try:
        module.accelerator.Graph()
    except Exception as error:
        return refuse(
            f"torch {module.__version__} has no graphs of torch.accelerator for '{device.type}' ({first_line(error)}). "
            "A device registers them with REGISTER_GRAPH_IMPL; NVIDIA, Ascend and Moore Threads devices have platforms "
            "of their own: install specgraph-cuda, specgraph-npu or specgraph-musa"
        )
    return Probe(available=True, device_count=int(module.accelerator.device_count()), versions=versions)

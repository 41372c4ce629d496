"""The best sustained device-memory bandwidth of this device, measured in the same run as what is compared with it."""

from __future__ import annotations

import torch

from specgraph.benchmarking.timing import device_time
from specgraph.platforms import Platform


def read_bandwidth(platform: Platform, gigabytes: float = 4.0) -> float:
    """Bytes a second of a large device-to-device copy, bytes read and written counted; the best of several.

    The buffers are far larger than any cache.
    """
    count = int(gigabytes * 1e9 / 2 / 4)
    source = torch.randn(count, device=platform.device)
    target = torch.empty_like(source)
    times = device_time(platform, lambda: target.copy_(source), repeats=20, warmup=3)
    return 2 * source.nbytes / min(times) * 1e6

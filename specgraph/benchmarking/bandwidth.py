"""The best sustained device-memory bandwidth of this device, measured in the same run as what is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specgraph.benchmarking.timing import device_time
from specgraph.platforms import Platform

_BURST = 24


def read_bandwidth(platform: Platform, gibibytes: float = 4.0) -> float:
    """Bytes a second: the better of a large copy (bytes read and written) and a large read, the best of several.

    Weights are only read, so a copy alone would understate what a draft step can reach, and a floor made of it would
    be too high. The buffers are far larger than any cache, and calls stand back to back.
    """
    # A power of two: a reduction over another size reads up to 3 % slower, which would raise the floor.
    count = 1 << (int(gibibytes * 2**30) // 8).bit_length() - 1
    source = torch.randn(count, device=platform.device)
    target = torch.empty_like(source)
    copied = _seconds(platform, lambda: target.copy_(source))
    read = _seconds(platform, source.amax)
    return max(2 * source.nbytes / copied, source.nbytes / read)


def _seconds(platform: Platform, call: Callable[[], Any]) -> float:
    def burst() -> None:
        for _ in range(_BURST):
            call()

    return min(device_time(platform, burst, repeats=10, warmup=2)) / _BURST / 1e6

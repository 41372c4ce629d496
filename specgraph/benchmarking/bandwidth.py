"""Device-memory bandwidth, measured in the same run as the times that are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specgraph.benchmarking.timing import device_time
from specgraph.platforms import Platform

_BURST = 24


def read_bandwidth(platform: Platform, gibibytes: float = 4.0) -> float:
    """The bandwidth of device memory in bytes per second: the larger one of a copy and of a read, best of 10 times.

    A copy counts the bytes it reads and those it writes. Reads are measured too because a draft step only reads its
    weights, and a read is faster than a copy.

    Args:
        gibibytes: size of what is copied and read; far larger than any cache.
    """
    # A power of two, because torch reads up to 3 % slower in a reduction over another size.
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

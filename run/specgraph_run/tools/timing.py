"""Measures the device and host time of a call, and counts the work that it issues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.device import Platform

_Way = TypeVar("_Way")


def device_time(platform: Platform, call: Callable[[], Any], *, repeats: int, warmup: int = 5) -> list[float]:
    """Return the microseconds of device work of each of `repeats` calls. On the CPU, return `host_time`."""
    if platform.device.type == "cpu":
        return host_time(platform, call, repeats=repeats, warmup=warmup)
    for _ in range(warmup):
        call()
    platform.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        start, end = platform.event(timing=True), platform.event(timing=True)
        start.record(platform.current_stream())
        call()
        end.record(platform.current_stream())
        platform.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def host_time(platform: Platform, call: Callable[[], Any], *, repeats: int, warmup: int = 5) -> list[float]:
    """Return the microseconds until each of `repeats` calls returns to the host; the device is idle before each."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    for _ in range(repeats):
        platform.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    platform.synchronize()
    return times


def in_turns(ways: Sequence[_Way], turns: int) -> Iterator[_Way]:
    """Yield each of `ways` once per turn, so that a drift of the machine's speed affects all of them alike.

    Each turn has a new random order: the work before heats the device, and its temperature sets its clock.
    """
    order = Random(0)
    for _ in range(turns):
        yield from order.sample(ways, len(ways))


class _Traffic(TorchDispatchMode):
    """Counts copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = {"copies_to_host": 0, "copies_to_device": 0}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != out.device.type:
                self.copies["copies_to_host" if out.device.type == "cpu" else "copies_to_device"] += 1
        return out


def count_issued(platform: Platform, call: Callable[[], Any]) -> dict[str, int]:
    """Return the counts of what one call issues: the platform's own counts, and copies between host and device.

    Empty if the platform counts nothing.
    """
    before = platform.counts()
    if not before:
        return {}
    with _Traffic() as traffic:
        call()
    after = platform.counts()
    return {name: after[name] - before[name] for name in after} | traffic.copies

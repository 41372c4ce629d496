"""Device and host time of a call, the work it issues, and how often it waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, supported_activities
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.device import Platform


def device_time(platform: Platform, call: Callable[[], Any], *, repeats: int, warmup: int = 5) -> list[float]:
    """Microseconds of device work for each of `repeats` calls, by events; on the CPU, wall time."""
    for _ in range(warmup):
        call()
    platform.synchronize()
    times: list[float] = []
    if platform.device.type == "cpu":
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return times
    for _ in range(repeats):
        start, end = platform.event(timing=True), platform.event(timing=True)
        start.record(platform.current_stream())
        call()
        end.record(platform.current_stream())
        platform.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def host_time(platform: Platform, call: Callable[[], Any], *, repeats: int, warmup: int = 5) -> list[float]:
    """Microseconds until each of `repeats` calls returns to the host; the device is idle before each."""
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


def count_kernels(platform: Platform, call: Callable[[], Any]) -> int | None:
    """Kernels that one call runs on the device, from a profiler trace; None if torch's profiler supports no device."""
    devices = [a for a in supported_activities() if a is not ProfilerActivity.CPU]
    if platform.device.type == "cpu" or not devices:
        return None
    with profile(activities=devices, acc_events=True) as trace:
        call()
    skipped = ("Memcpy", "Memset", "Activity Buffer")
    events = [e for e in trace.events() or [] if e.device_type.name != "CPU"]
    return sum(not e.name.startswith(skipped) for e in events) or None


class HostReads(TorchDispatchMode):
    """Counts the times that the host reads a device value; each waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default or _copies_to_host(args, out):
            self.count += 1
        return out


class _ListReads(TorchFunctionMode):
    """Counts `tolist` and `numpy` of host tensors, which `HostReads` does not see: they bypass dispatch."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and args[0].device.type == "cpu":
            self._reads.count += 1
        return func(*args, **(kwargs or {}))


def _copies_to_host(args: tuple[Any, ...], out: Any) -> bool:
    source = args[0] if args else None
    if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
        return False
    return out.device.type == "cpu" and source.device.type != "cpu"


class _Copies(TorchDispatchMode):
    """Counts copies between host and device, by direction."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"copies_to_host": 0, "copies_to_device": 0}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != out.device.type:
                self.count["copies_to_host" if out.device.type == "cpu" else "copies_to_device"] += 1
        return out


def count_issued(platform: Platform, call: Callable[[], Any]) -> dict[str, int]:
    """Count launches, updates and the like that one call issues, as the platform counts them, and copies between host
    and device; empty if the platform counts nothing."""
    before = platform.counts()
    if not before:
        return {}
    copies = _Copies()
    with copies:
        call()
    after = platform.counts()
    return {name: after[name] - before[name] for name in after} | copies.count


def count_host_reads(call: Callable[[], Any]) -> int:
    """Return the number of times that one call reads device values on the host."""
    reads = HostReads()
    with reads, _ListReads(reads):
        call()
    return reads.count

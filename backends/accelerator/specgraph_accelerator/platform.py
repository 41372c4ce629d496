"""One device of torch's accelerator as a specgraph platform, with torch's own streams, events and graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from specgraph.device import Capabilities, Event, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph.device.installed import installed_version
from specgraph.device.trial_process import Findings, findings
from specgraph.errors import PlatformError, UnsupportedError

from specgraph_accelerator.graph import AcceleratorGraph, AcceleratorGraphPool
from specgraph_accelerator.trials import TRIALS, capabilities

MOST_STREAMS = 128
"""The streams that are asked for in search of one that the platform does not use itself."""


class AcceleratorPlatform(Platform):
    """Device `index` of this process's accelerator.

    Attributes:
        module: the device's own torch module, such as torch.xpu. It has the device's name and random generator.
    """

    graph_type = AcceleratorGraph
    pool_type = AcceleratorGraphPool

    def __init__(self, index: int, found: Findings | None = None) -> None:
        """
        Args:
            found: the results of the trials on this device. None runs the trials; an empty mapping claims nothing.

        Raises:
            PlatformError: there is no accelerator or no device `index`, or the device can't be opened.
            ConfigError: SPECGRAPH_ACCELERATOR_TRIALS has an unknown value.
        """
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise PlatformError(f"torch sees no accelerator, index {index} was asked for")
        if not 0 <= index < (count := torch.accelerator.device_count()):
            raise PlatformError(f"there are {count} devices of '{kind.type}', index {index} was asked for")
        self.index = index
        device = torch.device(kind.type, index)
        self.module: Any = torch.get_device_module(device)
        super().__init__(_info(self.module, device))
        if found is None:
            found = findings(self, index, "specgraph_accelerator.trials", TRIALS)
        self._capabilities = capabilities(found) if found else None

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise PlatformError("this accelerator platform was opened for trials only: it claims no capabilities")
        return self._capabilities

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.index)

    def memory(self) -> MemoryInfo:
        """Return the memory that this process's allocator counts. `free` and `total` are 0 if the device can't tell
        them."""
        allocated = torch.accelerator.memory_allocated(self.index)
        reserved = torch.accelerator.memory_reserved(self.index)
        try:
            free, total = torch.accelerator.get_memory_info(self.index)
        except RuntimeError:
            return MemoryInfo(allocated, reserved, 0)
        return MemoryInfo(allocated, reserved, total, free + reserved - allocated)

    def stream(self) -> Stream:
        """Return a stream, not the platform's own for captures or copies if the device has another. Devices hand out a
        fixed set of streams in turn, so two calls may return the same one."""
        made: Any = torch.Stream(device=self.device)
        for _ in range(MOST_STREAMS):
            if not self.is_own_stream(made):
                break
            made = torch.Stream(device=self.device)
        return made

    def current_stream(self) -> Stream:
        now: Any = torch.accelerator.current_stream(self.index)
        return now

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        if not isinstance(stream, torch.Stream) or stream.device != self.device:
            raise PlatformError(f"{stream!r} is no stream of {self.device}: make one with platform.stream()")
        return _current(stream)

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return an event. Raises UnsupportedError for an external event: torch.accelerator has none."""
        if external:
            raise UnsupportedError(f"no external events here: {self.capabilities.external_events.reason}")
        made: Any = torch.Event(self.device, enable_timing=timing)
        return made

    def is_capturing(self) -> bool:
        return torch.accelerator.current_stream(self.index).is_capturing()


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Generator[None]:
    """Make `stream` and its device this thread's current ones within the block.

    torch's own `with stream:` can't be nested: it keeps the stream to restore in the stream object.
    """
    device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def _info(module: Any, device: torch.device) -> PlatformInfo:
    versions = {"torch": torch.__version__, "device": device.type}
    versions |= {"specgraph-accelerator": found} if (found := installed_version("specgraph-accelerator")) else {}
    name = str(module.get_device_name(device.index)) if hasattr(module, "get_device_name") else device.type
    simulated = str(getattr(module, "simulated", ""))  # only devices made for tests have this attribute
    kind = simulated or f"'{device.type}' through torch.accelerator"
    return PlatformInfo("accelerator", device, name, versions, kind, simulated=bool(simulated))

"""One Moore Threads GPU as a specgraph platform, directly on torch.musa."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from specgraph.device import Capabilities, Event, MemoryInfo, Platform, PlatformInfo, Stream
from specgraph.device.installed import installed_version
from specgraph.device.trial_process import Findings, findings
from specgraph.errors import PlatformError, UnsupportedError

from specgraph_musa.graph import MusaGraph, MusaGraphPool
from specgraph_musa.policy import Policy, policy_from
from specgraph_musa.trials import TRIALS, capabilities
from specgraph_musa.triton_ops import register_ops, why_absent


class MusaPlatform(Platform):
    """GPU `index` of this process.

    Attributes:
        musa: the module torch.musa.
        policy: the choices in force.
        release: how a closed graph's memory is given back: "by_reset" (`MUSAGraph.reset` does it), "by_own_call"
            (`release_share` does it after the reset), or "never" (neither works).
    """

    graph_type = MusaGraph
    pool_type = MusaGraphPool
    musa: Any

    def __init__(self, index: int, policy: Policy | None = None, found: Findings | None = None) -> None:
        """
        Args:
            policy: None reads it from the environment.
            found: the results of the trials on this device. None runs the trials; an empty mapping claims nothing.

        Raises:
            PlatformError: there is no device `index`, or it can't be opened.
            ConfigError: a SPECGRAPH_MUSA_* variable has an unknown value.
        """
        import torch_musa  # pyright: ignore[reportMissingImports]

        self.policy = policy_from() if policy is None else policy
        self.musa, self.index = torch_musa, index
        if not 0 <= index < (count := self.musa.device_count()):
            raise PlatformError(f"there are {count} MUSA devices, index {index} was asked for")
        super().__init__(_info(self.musa, index))
        self._stream, self._event = handle_types(self.musa)
        self.release = "never"
        if found is None:
            found = findings(self, index, "specgraph_musa.trials", TRIALS)
        self._capabilities: Capabilities | None = None
        if found:
            self.release = found["release"]
            found = {**found, "triton": found["triton"] or why_absent(self) or ""}  # it may be gone since the trials
            self._capabilities = capabilities(found, self.policy)
            if not found["triton"]:
                register_ops(self)

    @property
    def capabilities(self) -> Capabilities:
        """The claimed capabilities. The merged loop and collectives also depend on the policy."""
        if self._capabilities is None:
            raise PlatformError("this musa platform was opened for trials only: it claims no capabilities")
        return self._capabilities

    def synchronize(self) -> None:
        self.musa.synchronize(self.index)

    def memory(self) -> MemoryInfo:
        """Return the memory of torch_musa's allocator in this process. Only `free` counts other processes too."""
        total = int(self.musa.get_device_properties(self.index).total_memory)
        allocated, reserved = self.musa.memory_allocated(self.index), self.musa.memory_reserved(self.index)
        return MemoryInfo(allocated, reserved, total, self.musa.mem_get_info(self.index)[0] + reserved - allocated)

    def stream(self) -> Stream:
        """Return a stream, never the platform's own for captures or copies. torch_musa hands out its 32 streams in
        turn, so two calls may return the same one."""
        while self.is_own_stream(made := self._stream(self.index)):
            pass
        return made

    def current_stream(self) -> Stream:
        now = self.musa.current_stream(self.index)
        return self._stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return self.musa.stream(own(self.musa.Stream, stream))

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return an event. Raises UnsupportedError for an external event."""
        if external:
            raise UnsupportedError(f"no external events here: {self.capabilities.external_events.reason}")
        return self._event(enable_timing=timing)

    def is_capturing(self) -> bool:
        with self.musa.device(self.index):
            return self.musa.is_current_stream_capturing()


def handle_types(musa: Any) -> tuple[type[Any], type[Any]]:
    """Return subclasses of `musa.Stream` and `musa.Event` that raise PlatformError for foreign handles.

    torch.musa's own classes cast any object without a check: a torch.Stream corrupts memory there and raises nothing.
    """

    class MusaEvent(musa.Event):
        def record(self, stream: Any = None) -> None:
            super().record(None if stream is None else own(musa.Stream, stream))

        def wait(self, stream: Any = None) -> None:
            super().wait(None if stream is None else own(musa.Stream, stream))

        def elapsed_time(self, end_event: Any) -> float:
            return super().elapsed_time(own(musa.Event, end_event))

    class MusaStream(musa.Stream):
        def record_event(self, event: Any = None) -> Any:
            return super().record_event(MusaEvent() if event is None else own(musa.Event, event))

        def wait_event(self, event: Any) -> None:
            super().wait_event(own(musa.Event, event))

        def wait_stream(self, stream: Any) -> None:
            super().wait_stream(own(musa.Stream, stream))

    return MusaStream, MusaEvent


def own(kind: type[Any], handle: Any) -> Any:
    """Return `handle`. Raises PlatformError unless it is an instance of `kind`, torch.musa's Stream or Event."""
    if not isinstance(handle, kind):
        what = kind.__name__.lower()
        raise PlatformError(
            f"{handle!r} is a {type(handle).__module__}.{type(handle).__name__}, no {what} of torch.musa: torch_musa "
            f"would cast it unchecked and corrupt memory. Make it with platform.{what}()"
        )
    return handle


def _info(musa: Any, index: int) -> PlatformInfo:
    properties = musa.get_device_properties(index)
    versions = {
        "torch": torch.__version__,
        "torch_musa": str(musa.__version__),
        "musa": str(getattr(torch.version, "musa", "unknown")),
        "architecture": f"{properties.major}.{properties.minor}",
    }
    versions |= {name: found for name in ("triton", "specgraph-musa") if (found := installed_version(name))}
    simulated = getattr(musa, "simulated", None)  # only the simulator has this attribute
    kind = simulated.DEVICE_KIND if simulated else "Moore Threads GPU"
    device = musa.current_stream(index).device  # take torch's name for the device: it may differ between releases
    return PlatformInfo("musa", device, properties.name, versions, kind, simulated=simulated is not None)

"""One Moore Threads GPU as a specgraph platform, directly on torch.musa."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from specgraph.errors import PlatformError, UnsupportedError
from specgraph.platforms import Capabilities, Event, GraphPool, MemoryInfo, Platform, PlatformInfo, Stream

from specgraph_musa.graph import MusaGraph
from specgraph_musa.handles import handle_types, own
from specgraph_musa.policy import Policy, policy_from
from specgraph_musa.pools import MusaGraphPool, Release, find_release
from specgraph_musa.probes import probe_capabilities


class MusaPlatform(Platform):
    """GPU `index` of this process.

    `musa` is the module torch.musa, for this package's own files; `policy` the choices in force; `captures` is held by
    the thread that captures.
    """

    def __init__(self, index: int, policy: Policy | None = None) -> None:
        """
        Args:
            index: which device.
            policy: what the environment asks for by default.

        Raises:
            PlatformError: there is no such device.
            ConfigError: a SPECGRAPH_MUSA_* variable has a value that means nothing.
        """
        import torch_musa  # pyright: ignore[reportMissingImports]

        self.policy = policy_from() if policy is None else policy
        self.musa: Any = torch_musa
        self.index = index
        musa = self.musa
        if not 0 <= index < musa.device_count():
            raise PlatformError(f"there are {musa.device_count()} MUSA devices, index {index} was asked for")
        properties = musa.get_device_properties(index)
        # The vendor's stream knows what torch calls this device; a name of our own could be wrong.
        device: torch.device = musa.current_stream(index).device
        versions = {
            "torch": torch.__version__,
            "torch_musa": str(torch_musa.__version__),
            "musa": str(getattr(torch.version, "musa", "unknown")),
            "architecture": f"{properties.major}.{properties.minor}",
        }
        stand_in = getattr(torch_musa, "simulated", None)  # specgraph's test equipment names itself
        kind = "Moore Threads GPU" if stand_in is None else stand_in.device_kind()
        self._info = PlatformInfo("musa", device, properties.name, versions, kind, simulated=stand_in is not None)
        self._total = int(properties.total_memory)
        self._handles = handle_types(musa)
        with musa.device(index):
            self._side: Any = self._handles.stream(index)
        self.capture_stream = self._side
        self.captures = threading.RLock()
        self._release: Release = "never"
        self._is_closed = False
        self._probed = probe_capabilities(self, self._find_release)

    @property
    def info(self) -> PlatformInfo:
        """See `Platform.info`."""
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        """See `Platform.capabilities`. Probed when the platform was opened; the merged loop follows the policy, which
        asks whether torch.distributed has several ranks now."""
        if not self._probed.merged_loop:
            return self._probed
        collectives = has_collectives()
        return replace(
            self._probed,
            merged_loop=self.policy.merged_loop(collectives),
            default_lowering=self.policy.default_lowering(collectives),
        )

    def synchronize(self) -> None:
        """See `Platform.synchronize`."""
        self.musa.synchronize(self.index)

    def memory(self) -> MemoryInfo:
        """See `Platform.memory`. What torch_musa's allocator holds; other processes are not counted."""
        return MemoryInfo(self.musa.memory_allocated(self.index), self.musa.memory_reserved(self.index), self._total)

    def stream(self) -> Stream:
        """See `Platform.stream`. torch_musa hands out its 32 streams in turn: two of these may be the same one."""
        return self._handles.stream(self.index)

    def current_stream(self) -> Stream:
        """See `Platform.current_stream`."""
        now = self.musa.current_stream(self.index)
        return self._handles.stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See `Platform.use`."""
        return self.musa.stream(own(self.musa.Stream, stream, "stream"))

    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """See `Platform.event`. There are no external ones."""
        if external:
            raise UnsupportedError(f"no external events here: {self.capabilities.external_events.reason}")
        return self._handles.event(enable_timing=timing)

    def graph_pool(self) -> MusaGraphPool:
        """See `Platform.graph_pool`."""
        self._refuse_closed()
        return MusaGraphPool(self.musa, self.index, self._release, self.captures)

    def graph(self, pool: GraphPool | None = None) -> MusaGraph:
        """See `Platform.graph`."""
        self._refuse_closed()
        if pool is not None and not isinstance(pool, MusaGraphPool):
            raise PlatformError(f"{pool!r} is no pool of the musa platform")
        return MusaGraph(self, pool or self.graph_pool(), owns_pool=pool is None)

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return self.musa.is_current_stream_capturing()

    def close(self) -> None:
        """See `Platform.close`. Graphs and tensors belong to those who made them."""
        self._is_closed = True

    # ---- for the files of this package -----------------------------------------------------------------------------

    def stream_to_capture(self, asked: Stream | None) -> Any:
        """Where a capture runs: as asked, else always the same side stream."""
        return self._side if asked is None else own(self.musa.Stream, asked, "stream")

    def _find_release(self) -> None:
        with self.musa.device(self.index), self.musa.stream(self._side):
            self._release = find_release(self.musa, self.index, self._side)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise PlatformError("this musa platform is closed")


def has_collectives() -> bool:
    """Whether this process is one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1

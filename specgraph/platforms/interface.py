"""The waist: all that the drafting engine asks of a device.

Verbs and signatures are torch's own (`torch.Stream`, `torch.Event`, `torch.accelerator.Graph`), so a backend whose
vendor follows torch mostly hands the vendor's objects through. Whoever creates a handle owns it; handles with device
memory behind them have `close()`, and closing twice is harmless.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from specgraph.errors import UnsupportedError
from specgraph.platforms.capabilities import Capabilities

PLATFORM_API = 1
"""Version of this interface. A backend built for another number is refused at discovery, in one line."""

ErrorMode = Literal["global", "thread_local", "relaxed"]


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """Names one opened device. `versions` maps a component ("torch", "driver", ...) to its version string."""

    name: str
    device: torch.device
    device_name: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    device_kind: str = ""
    """What stands behind the name, in a few words: "GPU", or "simulated runtime, no device". Reports show it,
    so that nobody takes a stand-in for the device."""
    simulated: bool = False
    """The device is a simulation: what it computes can be looked at, how long it takes says nothing."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes. `reserved` includes what graph pools hold; `total` is 0 where it is unknown."""

    allocated: int
    reserved: int
    total: int


@runtime_checkable
class Event(Protocol):
    """A point in a stream. torch's verbs; `elapsed_time` is in milliseconds and needs `timing=True` on both ends."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


@runtime_checkable
class Stream(Protocol):
    """An ordered queue of device work. torch's verbs."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any: ...


class GraphPool(Protocol):
    """Memory that captured graphs allocate from. Freed when it and all graphs in it are closed."""

    def close(self) -> None: ...


class TaskGroup(Protocol):
    """Opaque: the captured tasks whose host parameters one `task_update` rewrites."""


class Graph(ABC):
    """One captured, replayable piece of device work.

    Everything allocated during capture lives in `pool` at fixed addresses; Python scalars are baked. The graph does
    not keep the tensors it reads alive: their owner does (see `specgraph.graphs.read_set`).
    """

    @property
    @abstractmethod
    def pool(self) -> GraphPool:
        """The pool this graph allocates from."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """True once `close()` was called."""

    @abstractmethod
    def capture(
        self, *, stream: Stream | None = None, error_mode: ErrorMode = "thread_local"
    ) -> AbstractContextManager[None]:
        """Record the work issued in the `with` block instead of running it.

        Raises:
            CaptureError: the work can't be captured (host read, nested capture, ...), or this graph already holds a
                capture. Afterwards the platform and its streams are usable, and this graph is empty.
        """

    @abstractmethod
    def replay(self) -> None:
        """Launch the captured work on the current stream.

        Raises:
            CaptureError: nothing is captured, or the graph is closed.
            StaleInputError: a tensor it reads was freed, moved or resized (on platforms that can tell).
        """

    @abstractmethod
    def reset(self) -> None:
        """Drop the captured work; the graph can capture again."""

    @abstractmethod
    def close(self) -> None:
        """Release the graph and its share of the pool."""


class Platform(ABC):
    """One opened device. At most 15 abstract members, counted by a test.

    Beyond the abstract ones, `task_group` and `task_update` matter only where `capabilities.task_update`, and
    `attention_backends` only where the device has attention of its own, and `counts` only where it counts.
    """

    @property
    @abstractmethod
    def info(self) -> PlatformInfo:
        """Name, device and versions."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the device can do, with reasons."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all work on the device."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Device memory now, in bytes."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream on this device."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that work of this thread goes to."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Send this thread's work to `stream` within the `with` block."""

    @abstractmethod
    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """A new event. `external=True` needs `capabilities.external_events`, else UnsupportedError."""

    @abstractmethod
    def graph_pool(self) -> GraphPool:
        """A new, empty pool that several graphs can share."""

    @abstractmethod
    def graph(self, pool: GraphPool | None = None) -> Graph:
        """A new, empty graph; in a pool of its own unless `pool` is given."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""

    @abstractmethod
    def close(self) -> None:
        """Release what this object itself holds. Using it afterwards is an error.

        Graphs, pools and streams belong to those who made them, who close them before, or after: that still works.
        """

    @property
    def device(self) -> torch.device:
        """The torch device of this platform's tensors."""
        return self.info.device

    def task_group(self) -> AbstractContextManager[TaskGroup]:
        """In capture: gate and collect the tasks issued in the `with` block, to be rewritten by `task_update`.

        The captured graph stands before these tasks until an update of the group is issued: one update a replay.
        """
        raise UnsupportedError(
            f"platform '{self.info.name}' has no task update: {self.capabilities.task_update.reason}"
        )

    def task_update(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Re-issue, within the `with` block, exactly the ops of `group` with new host parameters, and open its gate.

        The order against the previous replay is kept on the device, without a host synchronise.

        Raises:
            UpdateError: the ops issued differ from the captured ones.
        """
        raise UnsupportedError(
            f"platform '{self.info.name}' has no task update: {self.capabilities.task_update.reason}"
        )

    def attention_backends(self) -> Mapping[str, Any]:
        """Attention of the device's own, by name: factories `(platform) -> specgraph.attention.AttentionBackend`.

        The core's paged attention in both flavours is there without being named here.
        """
        return {}

    def counts(self) -> Mapping[str, int]:
        """What was issued to the device through this platform since it was opened, by name; empty if it is not counted.

        For accounts such as "one launch and no synchronise a propose": names are the platform's own, such as
        "graph_launches" or "task_updates", and their numbers only grow.
        """
        return {}

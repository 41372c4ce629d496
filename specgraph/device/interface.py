"""The interface between the core and a device.

Streams and events have torch's own methods (`torch.Stream`, `torch.Event`), so that a backend can return the vendor's
objects as they are. Whoever creates a graph or pool owns it and closes it; closing twice is harmless.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from specgraph.device.capabilities import Capabilities
from specgraph.device.graph import Graph
from specgraph.device.pool import CaptureLock, GraphPool
from specgraph.errors import PlatformError, UnsupportedError

if TYPE_CHECKING:
    import torch

PLATFORM_API = 2
"""Version of this interface. A backend built for another number is refused at discovery, in one line."""


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """Names one opened device. `versions` maps a component ("torch", "driver", ...) to its version string."""

    name: str
    device: torch.device
    device_name: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    device_kind: str = ""
    """The kind of device in a few words: "GPU", or "simulated runtime, no device". Reports show it, so that a
    simulation is not taken for the device."""
    simulated: bool = False
    """The device is a simulation: its results are meaningful, its times are not."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes. `reserved` includes what graph pools hold; `total` is 0 where it is unknown."""

    allocated: int
    reserved: int
    total: int
    free: int = 0
    """Bytes that can still be allocated: used by no process, or reserved by this one and unused. 0 where unknown."""


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


class TaskGroup(Protocol):
    """Opaque: the captured tasks whose host parameters one `task_update` rewrites."""


class Platform(ABC):
    """One opened device. At most 15 abstract members, counted by a test.

    Beyond the abstract ones, `task_group`, `task_update` and `batch_task_updates` matter only where
    `capabilities.task_update` is claimed, `attention_backends` only where the device has attention of its own,
    `compile_ahead` only where kernels are compiled as they are launched, and `counts` only where launches are counted.

    Each member says who uses it: the core with the decoder, host engines (which embed a drafter), the
    suite (`specgraph conformance`).
    """

    graph_type: type[Graph]
    """The backend's subclass of `Graph`."""
    pool_type: type[GraphPool] = GraphPool
    """The backend's subclass of `GraphPool`."""

    def __init__(self, info: PlatformInfo) -> None:
        self.info = info
        """Name, device and versions. Used by: core, suite, reports."""
        self.captures = CaptureLock()
        """The capture under way, if any. Used by: backends."""
        self.is_closed = False
        """True once `close()` was called. Used by: backends."""

    @property
    def device(self) -> torch.device:
        """Return the torch device of this platform's tensors. Used by: core."""
        return self.info.device

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what the device can do, with reasons. Used by: core, suite, reports."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all work on the device. Used by: host engines, suite, benchmarks."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Device memory now, in bytes. Used by: host engines, suite."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream on this device. Used by: core (host transfers), suite."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that work of this thread goes to. Used by: core."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Send this thread's work to `stream` within the `with` block. Used by: core."""

    @abstractmethod
    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return a new event. `external=True` needs `capabilities.external_events`, else UnsupportedError.

        Used by: core (host transfers), benchmarks (`timing`), host engines and suite (`external`: a record or wait
        captured in a graph and visible outside of it).
        """

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether this thread's current stream is being captured, as the device itself says.

        Used by: host engines, suite (after each case).
        """

    @cached_property
    def capture_stream(self) -> Stream:
        """Return the stream that every capture of this platform runs on; warm work up here.

        One for all, since allocators keep free blocks, and libraries their workspaces, per stream. An engine that has
        a stream for this may assign it before the first capture. Used by: core.
        """
        return self.stream()

    @cached_property
    def copy_stream(self) -> Stream:
        """Return the stream that copies results to the host, beside the launches that follow. Used by: core."""
        return self.stream()

    @final
    def graph_pool(self) -> GraphPool:
        """Return a new, empty pool that several graphs can share. Used by: core.

        Raises:
            PlatformError: the platform is closed.
        """
        self.require_open()
        return self.pool_type(self)

    @final
    def graph(self, pool: GraphPool | None = None) -> Graph:
        """Return a new, empty graph; in a pool of its own unless `pool` is given. Used by: core.

        Raises:
            PlatformError: the platform is closed, or `pool` is another platform's.
        """
        self.require_open()
        if pool is None:
            return self.graph_type(self, self.graph_pool(), owns_pool=True)
        if not isinstance(pool, self.pool_type) or pool.platform is not self:
            raise PlatformError(
                f"{pool!r} is no pool of the '{self.info.name}' platform: make one with platform.graph_pool()"
            )
        return self.graph_type(self, pool)

    @final
    def require_open(self) -> None:
        """Refuse work on a closed platform. Used by: backends.

        Raises:
            PlatformError: the platform is closed.
        """
        if self.is_closed:
            raise PlatformError(f"this '{self.info.name}' platform is closed: open another one")

    def close(self) -> None:
        """Release what this object itself holds; it makes no new graphs afterwards. Closing twice is harmless.

        Graphs, pools and streams belong to those who made them, who close them before, or after: that still works.
        Used by: core.
        """
        self.is_closed = True

    def task_group(self) -> AbstractContextManager[TaskGroup]:
        """During capture: collect the tasks issued in the `with` block, to be rewritten by `task_update`.

        Used by: core (attention with host parameters), suite.

        Every replay needs one update of each group: before it, or while it runs and waits at the group, as
        `capabilities.update_order` says.

        Raises:
            UnsupportedError: the platform has no task update.
        """
        raise UnsupportedError(
            f"platform '{self.info.name}' has no task update: {self.capabilities.task_update.reason}"
        )

    def task_update(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Issue, within the `with` block, exactly the ops of `group` again with new host parameters.

        They are not run: their parameters are those of the group's tasks from the next replay on (`before_replay`) or
        of the replay that waits (`during_replay`). A previous replay that still runs keeps its own parameters, without
        a host synchronise. Used by: core (attention with host parameters), suite.

        Raises:
            UpdateError: the ops issued differ from the captured ones; nothing is rewritten.
            UnsupportedError: the platform has no task update.
        """
        raise UnsupportedError(
            f"platform '{self.info.name}' has no task update: {self.capabilities.task_update.reason}"
        )

    def batch_task_updates(self) -> AbstractContextManager[object]:
        """Within the `with` block, `task_update` of several groups may take effect together at its end, at less cost.

        If one of them fails, none of them need take effect. The block issues no other device work. Used by: core, for
        all groups of a replay that is updated before it is launched.
        """
        return nullcontext()

    def compile_ahead(self, bodies: Sequence[Callable[[], None]], progress: Callable[[int, int], None]) -> None:
        """Compile the kernels that device work needs, for a device that otherwise compiles them as they are launched.

        Nothing is run; what can't be compiled here is compiled where it is launched. Used by: core.

        Args:
            bodies: device work that can be captured.
            progress: called with the number of kernels compiled so far and their number in all.
        """
        return None

    def attention_backends(self) -> Mapping[str, Any]:
        """Return the device's own attention backends by name: factories `(platform) ->
        specgraph.attention.AttentionBackend`.

        The core's paged attention needs no entry here. Used by: core, suite.
        """
        return {}

    def counts(self) -> Mapping[str, int]:
        """Count each kind of call that was issued to the device since it was opened, by name; empty if not counted.

        The names are the platform's own, such as "graph_launches" or "task_updates"; the numbers only grow. For checks
        such as "one launch and no synchronise per propose". Used by: benchmarks, suite.
        """
        return {}


Progress = Callable[[str, int, int], None]
"""A user's function that takes the name of the work ("compiling kernels", "capturing"), how many pieces of it are done,
and their number."""

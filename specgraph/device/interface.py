"""The interface between the core and a device.

Streams and events have torch's own methods (`torch.Stream`, `torch.Event`), so that a backend can return the vendor's
objects as they are. The caller that makes a graph or pool owns it and closes it; closing twice is harmless.
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
"""The version of this interface. Discovery refuses a backend for another version, in one line."""


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """The names of one opened device. `versions` maps a component ("torch", "driver", ...) to its version string."""

    name: str
    device: torch.device
    device_name: str
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    device_kind: str = ""
    """The kind of device in a few words: "GPU", or "simulated runtime, no device". Reports show it, so that a
    reader does not mistake a simulation for the device."""
    simulated: bool = False
    """The device is a simulation: its results are meaningful, its times are not."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes. `reserved` includes the memory of graph pools; `total` is 0 if it is unknown."""

    allocated: int
    reserved: int
    total: int
    free: int = 0
    """Bytes that can still be allocated: used by no process, or reserved by this one and unused. 0 if unknown."""


@runtime_checkable
class Event(Protocol):
    """A point in a stream, with the methods of `torch.Event`. `elapsed_time` is in milliseconds, and needs
    `timing=True` on both events."""

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


@runtime_checkable
class Stream(Protocol):
    """An ordered queue of device work, with the methods of `torch.Stream`."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any: ...


class TaskGroup(Protocol):
    """An opaque handle of the captured tasks whose host parameters one `task_update` rewrites."""


class Platform(ABC):
    """One opened device. A backend must write the eight abstract members; a test counts them.

    A backend overrides the other members if it needs them: `task_group`, `task_update` and `batch_task_updates` if it
    claims `capabilities.task_update`, `attention_backends` if the device has attention of its own, `compile_ahead` if
    kernels are otherwise compiled at their launch, and `counts` if it counts launches.

    Each member's text names its users: the core (here with the decoder), host engines (which embed a drafter), the
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
        """The running capture, if any. Used by: backends."""
        self.is_closed = False
        """True once `close()` was called. Used by: backends."""

    @property
    def device(self) -> torch.device:
        """Return the torch device of this platform's tensors. Used by: core."""
        return self.info.device

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the device's capabilities, with reasons. Used by: core, suite, reports."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host for all work on the device. Used by: host engines, suite, benchmarks."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Return the current use of device memory, in bytes. Used by: host engines, suite."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream on this device. Used by: core (host transfers), suite."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that this thread issues work to. Used by: core."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Issue this thread's work to `stream` within the `with` block. Used by: core."""

    @abstractmethod
    def event(self, *, timing: bool = False, external: bool = False) -> Event:
        """Return a new event. Used by: core (host transfers), benchmarks (`timing`), host engines and suite
        (`external`).

        Args:
            timing: the event can take part in `elapsed_time`.
            external: a record or wait of the event that is captured in a graph is visible outside of it.

        Raises:
            UnsupportedError: `external` without `capabilities.external_events`.
        """

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether this thread's current stream is being captured, as the device itself says.

        Used by: host engines, suite (after each case).
        """

    @cached_property
    def capture_stream(self) -> Stream:
        """Return the stream that every capture of this platform runs on; warm work up on it.

        All captures share one stream, because allocators keep free blocks, and libraries their workspaces, per stream.
        A host engine with a capture stream of its own may assign it before the first capture. Used by: core.
        """
        return self.stream()

    @cached_property
    def copy_stream(self) -> Stream:
        """Return the stream that copies results to the host while later launches run. Used by: core."""
        return self.stream()

    @final
    def is_own_stream(self, stream: Stream) -> bool:
        """Return True for the platform's capture and copy streams, which `stream` must not hand out. Used by: backends
        whose devices hand out a fixed set of streams in turn."""
        return stream in [vars(self)[name] for name in ("capture_stream", "copy_stream") if name in vars(self)]

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
        """Return a new, empty graph in `pool`, by default in a pool of its own. Used by: core.

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
        """Release the resources of this object; it makes no new graphs afterwards. Closing twice is harmless.

        Graphs, pools and streams belong to the callers that made them, who may close them before or afterwards.
        Used by: core.
        """
        self.is_closed = True

    def _no_task_update(self) -> UnsupportedError:
        reason = self.capabilities.task_update.reason
        return UnsupportedError(f"platform '{self.info.name}' has no task update: {reason}")

    def task_group(self) -> AbstractContextManager[TaskGroup]:
        """Collect the tasks that a capture issues in the `with` block, so that `task_update` can rewrite them.

        Used by: core (attention with host parameters), suite.

        Every replay needs one update of each group. `capabilities.update_order` says when: before the replay, or while
        the replay waits at the group.

        Raises:
            UnsupportedError: the platform has no task update.
        """
        raise self._no_task_update()

    def task_update(self, group: TaskGroup) -> AbstractContextManager[None]:
        """Issue, within the `with` block, exactly the ops of `group` again with new host parameters.

        The ops are not run. The group's tasks take their parameters, from the next replay on (`before_replay`) or in
        the replay that waits (`during_replay`). An earlier replay that still runs keeps its own parameters, and the
        host does not wait for it. Used by: core (attention with host parameters), suite.

        Raises:
            UpdateError: the ops issued differ from the captured ones; nothing is rewritten.
            UnsupportedError: the platform has no task update.
        """
        raise self._no_task_update()

    def batch_task_updates(self) -> AbstractContextManager[object]:
        """Let the task updates of the `with` block take effect together at its end, which may cost less.

        If one of them fails, none need take effect. The block issues no other device work. Used by: core, for all
        groups of a replay that is updated before it is launched.
        """
        return nullcontext()

    def compile_ahead(self, bodies: Sequence[Callable[[], None]], progress: Callable[[int, int], None]) -> None:
        """Compile the kernels of `bodies` ahead, on a device that otherwise compiles each at its first launch.

        Nothing is run. A kernel that can't be compiled here is compiled at its first launch. Used by: core.

        Args:
            bodies: functions that issue device work and can be captured.
            progress: called with the number of kernels compiled so far and with their total.
        """
        return None

    def attention_backends(self) -> Mapping[str, Any]:
        """Return the device's own attention backends by name: factories `(platform) ->
        specgraph.attention.AttentionBackend`.

        The core's paged attention needs no entry here. Used by: core, suite.
        """
        return {}

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls of each kind since the device was opened, by name. Empty if not counted.

        The names are the platform's own, such as "graph_launches" or "task_updates"; the numbers only grow. For checks
        such as "one launch and no synchronise per propose". Used by: benchmarks, suite.
        """
        return {}


Progress = Callable[[str, int, int], None]
"""A user's function that takes the name of the work ("compiling kernels", "capturing"), the number of pieces that are
done, and their total."""

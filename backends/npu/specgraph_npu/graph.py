"""A captured graph on an NPU, and the pool that graphs share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specgraph.errors import CaptureError, SpecgraphError, UpdateError
from specgraph.platforms import Graph, Stream
from specgraph_npu.task_groups import NpuTaskGroup, reason_of

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform


class NpuGraphPool:
    """Memory that several graphs allocate from. It goes back to the device when the last graph in it is closed.

    torch_npu refuses a pool whose last graph is gone, and one whose capture failed keeps its share for good unless it
    is released by hand: so the pool counts, and takes a new identity when it starts anew.
    """

    def __init__(self, platform: NpuPlatform) -> None:
        self._platform = platform
        self._handle: Any = None
        self._users = 0
        self.is_closed = False

    def enter(self) -> Any:
        """The vendor's handle, for one more graph."""
        if self._handle is None:
            self._handle = self._platform.npu.graph_pool_handle()
        self._users += 1
        return self._handle

    def leave(self) -> None:
        """One graph less: torch_npu has released its share."""
        self._users -= 1
        if self._users == 0:
            self._handle = None
            self._platform.npu.empty_cache()  # torch_npu only marks the pool as free to go

    def give_up(self, *, allocating: bool) -> None:
        """Release the share of a graph whose capture failed, which torch_npu does not do itself.

        Args:
            allocating: the capture never began, so allocations are still routed to the pool.
        """
        vendor, device = self._platform.torch_npu._C, self._platform.device.index
        try:
            if allocating and (end := getattr(vendor, "_npu_endAllocateToPool", None)) is not None:
                end(device, self._handle)  # absent in torch_npu 2.12
            vendor._npu_releasePool(device, self._handle)
        except RuntimeError:
            pass  # the capture was refused before it reached the pool
        finally:
            self.leave()

    def close(self) -> None:
        """Allow no new graph in this pool."""
        self.is_closed = True


class NpuGraph(Graph):
    """One ACL graph, with the task groups captured into it."""

    def __init__(self, platform: NpuPlatform, pool: NpuGraphPool, number: int) -> None:
        self.number = number
        self.groups: list[NpuTaskGroup] = []
        self._platform, self._pool = platform, pool
        self._graph: Any = None
        self._is_closed = False
        self._error_mode: str = "thread_local"
        self._done = (platform.event_type(), platform.event_type())
        """Recorded after even and odd launches: the updates of launch i wait for launch i - 1."""
        self.launches = 0
        """Replays since the capture."""
        self._ordered_for = -1
        """The launch whose updates were put behind the one before it."""

    @property
    def pool(self) -> NpuGraphPool:
        """See `Graph.pool`."""
        return self._pool

    @property
    def is_closed(self) -> bool:
        """See `Graph.is_closed`."""
        return self._is_closed

    @property
    def is_captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    @contextmanager
    def _capture(self, stream: Stream | None) -> Generator[None]:
        platform, npu = self._platform, self._platform.npu
        if self._is_closed:
            raise CaptureError(f"graph {self.number} is closed")
        if self._graph is not None:
            raise CaptureError(f"graph {self.number} holds a capture already: reset() it first")
        if platform.capturing is not None:
            raise CaptureError(f"graph {platform.capturing.number} is being captured: captures don't nest")
        if self._pool.is_closed:
            raise CaptureError("the graph's pool is closed")
        on: Stream = platform.capture_stream if stream is None else stream
        outer = npu.current_stream()
        on.wait_stream(outer)
        platform.synchronize()  # the vendor's own capture does: memory still in use must not enter the pool
        platform.capturing = self
        try:
            with npu.stream(on), self._recording() as graph:
                yield
        except SpecgraphError:
            self._drop()
            raise
        except RuntimeError as error:
            self._drop()
            raise CaptureError(f"the work can't be captured: {reason_of(error)}") from error
        except BaseException:
            self._drop()
            raise
        finally:
            platform.capturing = None
        self._graph = graph
        outer.wait_stream(on)
        platform.graphs.add(self)

    @contextmanager
    def _recording(self) -> Generator[Any]:
        """A vendor graph that records the block. The vendor's own context leaves its stream current on a failure."""
        graph, handle = self._platform.npu.NPUGraph(), self._pool.enter()
        try:
            graph.capture_begin(pool=handle, capture_error_mode=self._error_mode)
        except BaseException:
            self._pool.give_up(allocating=True)
            raise
        try:
            yield graph
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                self._pool.give_up(allocating=False)
            else:
                graph.reset()
                self._pool.leave()
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._pool.give_up(allocating=False)
            raise

    def capture(self, *, stream: Stream | None = None, error_mode: str = "thread_local") -> Any:
        """See `Graph.capture`."""
        self._error_mode = error_mode
        return self._capture(stream)

    def replay(self) -> None:
        """See `Graph.replay`. Graphs with task groups then stand at each gate until its update.

        Raises:
            UpdateError: a group has had no update since the last launch: that replay still stands at its gate.
        """
        if self._is_closed or self._graph is None:
            state = "is closed" if self._is_closed else "holds no capture"
            raise CaptureError(f"graph {self.number} {state}: nothing to replay")
        self.require_updates()
        stream = self._platform.npu.current_stream()
        if not self.launches:
            self._platform.gates.first_wait(stream)
        for group in self.groups:
            group.updates = 0
        self._graph.replay()
        self._done[self.launches % 2].record(stream)
        self.launches += 1
        self._platform.counters.graph_launches += 1

    def require_updates(self) -> None:
        """Refuse to go on while the last launch stands at a gate that nobody will open. Its gates are opened then, so
        that the launch ends, with stale parameters, and the device can be used.

        Raises:
            UpdateError: names the groups without an update.
        """
        waiting = [group for group in self.groups if not group.updates] if self.launches else []
        if not waiting:
            return
        self.release()
        raise UpdateError(
            f"launch {self.launches} of graph {self.number} stood at {len(waiting)} of {len(self.groups)} task groups, "
            f"first at {waiting[0]}: no update was issued for them. What it computed is wrong. Issue one "
            "platform.task_update(group) for each group and replay"
        )

    def order_updates(self, stream: Stream) -> None:
        """Put the updates of the last launch behind the launch before it, on the device."""
        if self._ordered_for == self.launches:
            return
        self._ordered_for = self.launches
        if self.launches >= 2:
            stream.wait_event(self._done[self.launches % 2])

    def release(self) -> None:
        """Open the gates that the last launch stands at, so that it ends, with stale parameters."""
        if not self.launches:
            return
        for group in self.groups:
            if not group.updates:
                group.gate.record(self._platform.update_stream)
                group.updates += 1

    def reset(self) -> None:
        """See `Graph.reset`."""
        if self._graph is not None:
            self.release()
            self._done[0].synchronize()
            self._done[1].synchronize()
            self._graph.reset()
            self._pool.leave()
        self._drop()

    def close(self) -> None:
        """See `Graph.close`."""
        if not self._is_closed:
            self.reset()
            self._is_closed = True

    def _drop(self) -> None:
        self._platform.graphs.discard(self)
        self._graph = None
        self.groups.clear()
        self.launches, self._ordered_for = 0, -1

"""ACL graphs through torch_npu's capture: the primitives of `specgraph.device.Graph`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from specgraph.device import Graph, GraphPool, VendorMessage
from specgraph.errors import CaptureError, HostReadError, UpdateError
from specgraph_npu.probe import reason_of

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform
    from specgraph_npu.task_groups import NpuTaskGroup


class NpuGraphPool(GraphPool):
    """A private pool of torch_npu's caching allocator."""

    platform: NpuPlatform

    def _new_handle(self) -> Any:
        return self.platform.npu.graph_pool_handle()

    def _release(self, handle: Any) -> None:
        """Empty torch_npu's cache: until then it keeps a pool's memory, even after the last graph is gone."""
        self.platform.free_retired()


_NO_STREAM = "the device has no stream left: live graphs hold streams. Close some, or capture fewer sizes"
_NO_GRAPH = "the device holds no more graphs: close some, or capture fewer sizes"
_NO_QUEUE = (
    "the device gave the graph no stream. Close graphs or capture fewer sizes; if few graphs are live, the driver is "
    "older than HDK 25.5.1, which captures need: update it"
)


class NpuGraph(Graph):
    """One ACL graph, with the task groups captured into it."""

    messages = (
        VendorMessage("alloc sq cq fail", CaptureError, _NO_QUEUE),
        VendorMessage("no stream", CaptureError, _NO_STREAM),
        VendorMessage("too many streams", CaptureError, _NO_STREAM),
        VendorMessage("stream resources are insufficient", CaptureError, _NO_STREAM),  # torch_npu's text for 207008
        VendorMessage("insufficient_stream_resources", CaptureError, _NO_STREAM),  # the driver's text for it
        VendorMessage("insufficient model resources", CaptureError, _NO_GRAPH),  # 207010
        *Graph.messages,
        VendorMessage("107027", HostReadError, "captured code waits for the device: no .item(), .cpu() or synchronize"),
    )
    platform: NpuPlatform

    def __init__(self, platform: NpuPlatform, pool: GraphPool, *, owns_pool: bool = False) -> None:
        super().__init__(platform, pool, owns_pool=owns_pool)
        self.groups: list[NpuTaskGroup] = []
        self.launches = 0  # the launches since the capture
        self._graph: Any = None
        self._done = platform.event_type()  # recorded at the end of each launch

    def _begin(self, handle: Any) -> None:
        self._graph = None
        self.platform.synchronize()  # the pool must not take memory that is still in use
        self._graph = self.platform.npu.NPUGraph()
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self.platform.gate_stream.synchronize()  # now all gates are closed; this stream waits for no launch
        self.platform.graphs.add(self)

    def _abandon(self, began: bool) -> None:
        """Clean up after a failed capture: torch_npu goes on allocating from the pool, and keeps the graph's share of
        it. torch_npu 2.10 does so even when the capture began."""
        if self._graph is not None:
            vendor, device = self.platform.torch_npu._C, self.platform.device.index
            older = getattr(vendor, "_npu_endAllocateCurrentStreamToPool", None)  # its name before torch_npu 2.13
            end = older or vendor._npu_endAllocateToPool
            for call in (end, vendor._npu_releasePool):
                with contextlib.suppress(RuntimeError):  # the pool was left, or never reached
                    call(device, self.pool_handle)
        self._forget()
        if began:
            self.platform.check_task_queue()

    def _launch(self) -> None:
        """Launch the graph. On the device, it waits at the gate of each task group until the group's update."""
        self.platform.require_working()
        self.require_updates()
        self.order_updates()
        with self.platform.on_device():
            self._graph.replay()
        for group in self.groups:
            group.is_updated = False
        self._done.record(self.platform.current_stream())
        self.launches += 1
        self.platform.counters["graph_launches"] += 1

    def _destroy(self) -> None:
        """Destroy the graph, without waiting for a launch that needs an update. The garbage collector may call this at
        any time if the graph was not closed."""
        if self.launches and not self.platform.broken:
            self.release()
            if self.platform.is_waiting():
                self.platform.retired.append((self._done, self._graph, [group.gate for group in self.groups]))
                self._done = self.platform.event_type()
                self._forget()
                return
            self._done.synchronize()
        with self.platform.on_device():
            self._graph.reset()
        self._forget()

    def _reason(self, error: Exception) -> str:
        return reason_of(error)

    def _forget(self) -> None:
        self.platform.graphs.discard(self)
        self._graph, self.launches = None, 0
        self.groups.clear()

    def order_updates(self) -> None:
        """Make the next launch's updates wait for the end of the last launch, which still needs its parameters and
        gates."""
        if self.groups and self.launches:
            self.platform.update_stream.wait_event(self._done)

    def release(self) -> list[NpuTaskGroup]:
        """Open the gates that the last launch waits at, and return their task groups. The launch then ends, with stale
        parameters."""
        waiting = [group for group in self.groups if not group.is_updated]
        for group in waiting:
            group.open_gate()
        return waiting

    def require_updates(self) -> None:
        """Open the gates that the last launch waits at without an update. Raises UpdateError if there were any."""
        if waiting := self.release():
            raise UpdateError(
                f"launch {self.launches} of {self} waited at {len(waiting)} of {len(self.groups)} task groups, first "
                f"at {waiting[0]}: no update was issued for them. What it computed is wrong. Issue one "
                "platform.task_update(group) for each group and replay"
            )

"""Task groups: captured kernels with host parameters that are rewritten while their graph runs, behind a gate.

A task group is a range of captured kernels with a handle. Before each group, the graph waits for an external event, the
group's gate. Replay i issues

    replay stream   launch of graph i ............ | graph i: ... gate ] the group's kernels ...     record done(i)
    update stream   wait done(i - 1) | update group | open gate | next group ...

A gate is a semaphore that the graph closes again as it passes, so each replay needs exactly one update. Replay i - 1
still needs the group and its gate, so the update of replay i waits for done(i - 1). Each kernel of an update rewrites
its task at once. If an update fails midway, the group is therefore updated again with its previous values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from specgraph.errors import CaptureError, SpecgraphError, UnsupportedError, UpdateError
from specgraph_npu.probe import reason_of

if TYPE_CHECKING:
    from specgraph_npu.graph import NpuGraph
    from specgraph_npu.platform import NpuPlatform


class ExternalEvent:
    """A semaphore that streams and running graphs wait at. A wait closes it as it passes. Gates are such events.

    If the runtime has aclrtValueWait, torch_npu's event is such a semaphore, and each issued record lets one wait pass.
    If not, the first record creates the event, and a wait captured before that is silently dropped. An open event then
    stays open until it is reset. This class therefore records and resets the event when it is made, and resets it with
    each wait.
    """

    def __init__(self, platform: NpuPlatform) -> None:
        """Make a closed event. In a capture, it is closed when `platform.gate_stream` has got there."""
        self._platform, self._event = platform, platform.npu.ExternalEvent()
        if not platform.waits_for_values:
            self._event.record(platform.gate_stream)
            self._event.reset(platform.gate_stream)
            if not platform.captures.is_here:
                platform.gate_stream.synchronize()

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or self._platform.current_stream())
        self._platform.counters["event_records"] += 1

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait. Raises CaptureError if torch_npu would drop the wait: replays would then use stale
        parameters."""
        if not self._event.npu_event:
            raise CaptureError("an external event does not exist yet: torch_npu would drop its captured wait")
        stream = stream or self._platform.current_stream()
        self._event.wait(stream)
        if not self._platform.waits_for_values:
            self._event.reset(stream)

    def query(self, end_event: Any = None) -> Any:
        """Raises UnsupportedError, as all calls do with which the host asks or waits. The runtime refuses them, but
        torch_npu returns at once without an error."""
        raise UnsupportedError(
            "an external event of an NPU can't be queried, timed, or waited for by the host: let a stream wait for it"
        )

    synchronize = elapsed_time = query


class NpuTaskGroup:
    """One captured task group: its runtime handle, its gate, and its graph.

    Attributes:
        is_updated: the group was updated since the graph's last launch. The next launch needs this of all groups.
        issue: issues the group's kernels with the captured or last updated values. None if only the caller of updates
            can issue them.
    """

    def __init__(self, graph: NpuGraph) -> None:
        self.graph, self.number, self.gate = graph, len(graph.groups), ExternalEvent(graph.platform)
        self.handle: Any = None
        self.is_updated = True
        self.issue: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"task group {self.number} of {len(self.graph.groups)}"

    def issue_in_update(self, issue: Callable[[], None]) -> None:
        """Call `issue` in a task update, and keep it to issue these values again. A failed update takes it back."""
        self.issue = issue
        issue()

    def open_gate(self) -> None:
        """Let the graph's last launch pass the gate, in the update stream's order."""
        self.gate.record(self.graph.platform.update_stream)
        self.is_updated = True

    @contextmanager
    def capture(self) -> Generator[NpuTaskGroup]:
        """Capture the gate, and the block's kernels as this group; see `Platform.task_group`."""
        npu, stream = self.graph.platform.npu, self.graph.platform.current_stream()
        self.gate.wait(stream)
        npu.graph_task_group_begin(stream)
        try:
            yield self
            self.handle = npu.graph_task_group_end(stream)
        except RuntimeError as error:  # the block held no kernel, or a copy, an event or a host call
            raise CaptureError(f"a task group can't be captured: {reason_of(error)}") from error
        self.graph.groups.append(self)

    @contextmanager
    def update(self) -> Generator[None]:
        """Let the block issue the group's kernels again, then open the gate; see `Platform.task_update`.

        After a failure the group gets its last good values if they are known, and the gate is opened, so that the
        launch ends.

        Raises:
            UpdateError: the graph is gone, or none of its launches waits for this update; then nothing was issued. Or
                the block issued other kernels than the captured ones; then the launch's results are wrong.
            PlatformError: a failed update could not be undone; the platform takes no more work.
        """
        graph, platform, last_good = self.graph, self.graph.platform, self.issue
        platform.require_working()
        if not graph.is_captured or self.handle is None:
            raise UpdateError(f"{self}: its graph was {'closed' if graph.is_closed else 'reset'}; capture again")
        if self.is_updated:
            raise UpdateError(
                f"{self}: no launch waits for an update, its graph was not launched or the group was updated already. "
                "The gate would stay open for the next replay: replay first, then issue one update"
            )
        with platform.npu.stream(platform.update_stream):
            try:
                with self._rewritten():
                    yield
                self.open_gate()
            except BaseException as error:
                self.issue = last_good
                self._restore(error)
                platform.require_working()
                if isinstance(error, RuntimeError) and not isinstance(error, SpecgraphError):
                    raise UpdateError(
                        f"{self}: the update does not fit what was captured: {reason_of(error)}. What launch "
                        f"{graph.launches} of its graph computed is wrong"
                    ) from error
                raise
        platform.counters["task_updates"] += 1
        if platform.retired:
            platform.free_retired()

    @contextmanager
    def _rewritten(self) -> Generator[None]:
        npu, stream = self.graph.platform.npu, self.graph.platform.update_stream
        npu.graph_task_update_begin(stream, self.handle)
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # it raises if fewer kernels came than were captured
                npu.graph_task_update_end(stream)
            raise
        npu.graph_task_update_end(stream)

    def _restore(self, failure: BaseException) -> None:
        """Issue the last good values after a failed update, and open the gate. On an error the platform is broken."""
        try:
            if "process exits for this inner error" in str(failure):  # TASK_QUEUE_ENABLE=1 drops all work after it
                raise failure
            if self.issue is not None:
                with self._rewritten():
                    self.issue()
            self.open_gate()
        except Exception as error:
            self.graph.platform.broken = (
                f"an update of {self} failed and could not be undone: {reason_of(error)} Launches that wait for it "
                "never end: start a new process"
            )

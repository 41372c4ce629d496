"""Captured tasks whose host parameters are rewritten while their graph runs, and the gates that make it safe.

A task group is a range of captured kernels with a handle. Before each group, the graph waits for an external event, the
group's gate. Round i issues

    replay stream   launch of graph i ............ | graph i: ... gate ] the group's kernels ...     record done(i)
    update stream   wait done(i - 1) | update group | open gate | next group ...

A gate is a semaphore that the graph closes again as it passes: one update per replay, no more and no fewer. The wait
for done(i - 1) keeps round i's update away from a group, and its gate, that replay i - 1 still needs. Each kernel of an
update rewrites its task at once: after one that fails midway, the group is updated again with the values it had before.
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
    """A semaphore that streams and running graphs wait at, and that a wait closes as it passes: gates are such events.

    With aclrtValueWait in the runtime, torch_npu's event is one, and each issued record takes one wait. Without, the
    event is created by its first record, a wait captured before that is dropped without a word, and an open event stays
    open until it is reset: it is recorded and reset here when it is made, and reset with each wait.
    """

    def __init__(self, platform: NpuPlatform) -> None:
        """Closed; in a capture, when `platform.gate_stream` has got there."""
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
        """Raises CaptureError where torch_npu would drop the wait, and replays run with stale parameters."""
        if not self._event.npu_event:
            raise CaptureError("an external event does not exist yet: torch_npu would drop its captured wait")
        stream = stream or self._platform.current_stream()
        self._event.wait(stream)
        if not self._platform.waits_for_values:
            self._event.reset(stream)

    def query(self, end_event: Any = None) -> Any:
        """Refused, as is all that the host asks: the runtime refuses it, and torch_npu answers at once all the same."""
        raise UnsupportedError(
            "an external event of an NPU can't be queried, timed, or waited for by the host: let a stream wait for it"
        )

    synchronize = elapsed_time = query


class NpuTaskGroup:
    """One captured task group: its runtime handle, its gate, and the graph it is in.

    Attributes:
        is_updated: since the graph's last launch; all groups are when the next launch comes.
        issue: issues the group's kernels as they were captured or last updated; None: only the caller of updates can.
    """

    def __init__(self, graph: NpuGraph) -> None:
        self.graph, self.number, self.gate = graph, len(graph.groups), ExternalEvent(graph.platform)
        self.handle: Any = None
        self.is_updated = True
        self.issue: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"task group {self.number} of {len(self.graph.groups)}"

    def issue_in_update(self, issue: Callable[[], None]) -> None:
        """Call `issue` in a task update, and keep it as the last good values unless the update fails."""
        self.issue = issue
        issue()

    def open_gate(self) -> None:
        """Let the graph's last launch pass, when the update stream gets here."""
        self.gate.record(self.graph.platform.update_stream)
        self.is_updated = True

    @contextmanager
    def capture(self) -> Generator[NpuTaskGroup]:
        """Gate and collect the kernels issued in the block; see `Platform.task_group`."""
        npu, stream = self.graph.platform.npu, self.graph.platform.current_stream()
        self.gate.wait(stream)
        npu.graph_task_group_begin(stream)
        try:
            yield self
            self.handle = npu.graph_task_group_end(stream)
        except RuntimeError as error:  # no kernel, a copy, an event or a host call
            raise CaptureError(f"a task group can't be captured: {reason_of(error)}") from error
        self.graph.groups.append(self)

    @contextmanager
    def update(self) -> Generator[None]:
        """Issue the group's kernels again in the block, then open its gate; see `Platform.task_update`.

        After a failure it gets its last good values, where they are known, and its gate is opened: the launch ends.

        Raises:
            UpdateError: the graph is gone, or no launch of it waits for this update: nothing was issued. Or the kernels
                issued are not those that were captured: what the launch computed is wrong.
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
            with suppress(RuntimeError):  # fewer kernels than captured
                npu.graph_task_update_end(stream)
            raise
        npu.graph_task_update_end(stream)

    def _restore(self, failure: BaseException) -> None:
        """After a failed update: issue the last good values, and open the gate."""
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

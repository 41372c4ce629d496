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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgraph.errors import CaptureError, SpecgraphError, UnsupportedError, UpdateError
from specgraph.platforms import Event
from specgraph_npu.probe import reason_of

if TYPE_CHECKING:
    from specgraph_npu.graph import NpuGraph
    from specgraph_npu.platform import NpuPlatform

_QUEUE_ENDED = "process exits for this inner error"
"""Reported when torch_npu's task queue (TASK_QUEUE_ENABLE=1) could not launch a kernel: it then drops all work."""


@dataclass(slots=True, eq=False)
class NpuTaskGroup:
    """One captured task group: its runtime handle, its gate, and the graph it is in."""

    graph: NpuGraph
    number: int
    gate: Any
    handle: Any = None
    updates: int = 0  # since the graph's last launch: 1 when the next launch comes
    issue: Callable[[], None] | None = None
    """Issues the group's kernels as they were captured or last updated; None: only the caller of the updates can."""
    next_issue: Callable[[], None] | None = None
    """Replaces `issue` when the update that is being made has ended."""

    def __str__(self) -> str:
        return f"task group {self.number} of {len(self.graph.groups)}"


@contextmanager
def capture_group(platform: NpuPlatform, graph: NpuGraph) -> Generator[NpuTaskGroup]:
    """Gate and collect the kernels issued in the block; see `Platform.task_group`.

    Raises:
        CaptureError: the gate does not exist yet, or the block issued no kernel, a copy, an event or a host call.
    """
    npu, stream = platform.npu, platform.current_stream()
    group = NpuTaskGroup(graph, len(graph.groups), platform.gates.take())
    if not group.gate.npu_event:
        raise CaptureError(
            f"the gate of task group {group.number} does not exist in the runtime yet: torch_npu would drop its "
            "captured wait without a word, and replays would run with stale parameters"
        )
    group.gate.wait(stream)
    group.gate.reset(stream)
    npu.graph_task_group_begin(stream)
    try:
        yield group
        group.handle = npu.graph_task_group_end(stream)
    except RuntimeError as error:
        raise CaptureError(f"a task group can't be captured: {reason_of(error)}") from error
    graph.groups.append(group)


@contextmanager
def update_group(platform: NpuPlatform, group: NpuTaskGroup) -> Generator[None]:
    """Issue a group's kernels again in the block, then open its gate; see `Platform.task_update`.

    After a failure the group gets its last good values, where they are known, and its gate is opened: the launch ends.

    Raises:
        UpdateError: the graph is gone, was not launched, or had its update already: nothing was issued. Or the kernels
            issued are not those that were captured: what the launch computed is wrong.
        PlatformError: a failed update could not be undone; the platform takes no more work.
    """
    graph = group.graph
    platform.require_working()
    if not graph.is_captured or group.handle is None:
        raise UpdateError(f"{group}: its graph was {'closed' if graph.is_closed else 'reset'}; capture again")
    if not graph.launches or group.updates:
        done = "was updated already since its graph's last launch" if graph.launches else "was not launched yet"
        raise UpdateError(
            f"{group} {done}: its gate would stay open, and the next replay would pass it before its update. "
            "Replay first, then issue one update"
        )
    with platform.npu.stream(platform.update_stream):
        graph.order_updates()
        try:
            with _update(platform, group):
                yield
            open_gate(platform, group)
        except BaseException as error:
            group.next_issue = None
            _restore(platform, group, error)
            platform.require_working()
            if isinstance(error, RuntimeError) and not isinstance(error, SpecgraphError):
                raise UpdateError(
                    f"{group}: the update does not fit what was captured: {reason_of(error)}. What launch "
                    f"{graph.launches} of its graph computed is wrong"
                ) from error
            raise
    group.issue, group.next_issue = group.next_issue or group.issue, None
    platform.counters.task_updates += 1


def open_gate(platform: NpuPlatform, group: NpuTaskGroup) -> None:
    """Let the graph's last launch pass."""
    group.gate.record(platform.update_stream)
    group.updates += 1
    platform.counters.event_records += 1


@contextmanager
def _update(platform: NpuPlatform, group: NpuTaskGroup) -> Generator[None]:
    npu, stream = platform.npu, platform.update_stream
    npu.graph_task_update_begin(stream, group.handle)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # fewer kernels than captured
            npu.graph_task_update_end(stream)
        raise
    npu.graph_task_update_end(stream)


def _restore(platform: NpuPlatform, group: NpuTaskGroup, failure: BaseException) -> None:
    """After a failed update: give the group the values it had before, and open its gate."""
    try:
        if _QUEUE_ENDED in str(failure):
            raise failure
        if group.issue is not None:
            with _update(platform, group):
                group.issue()
        open_gate(platform, group)
    except RuntimeError as error:
        platform.broken = (
            f"an update of {group} failed and could not be undone: {reason_of(error)} Launches that wait for it never "
            "end: start a new process"
        )


class Gates:
    """Makes external events: semaphores that streams and running graphs wait at, and that a wait closes again.

    Where the runtime can wait for values, a wait closes torch_npu's ExternalEvent as it passes, and each issued record
    takes one wait. Where it can't, the event is created by its first record, a wait captured before that is dropped
    without a word, and an open event stays open until it is reset: each is recorded and reset here before its capture.
    """

    def __init__(self, platform: NpuPlatform, created_at_once: bool, stream: Any) -> None:
        """created_at_once: the runtime can wait for values; stream: one that never waits for anything."""
        self._platform, self._created_at_once, self.stream = platform, created_at_once, stream

    def take(self) -> Any:
        """A closed gate for a task group: the vendor's object, whose captured wait needs a captured reset."""
        gate = self._platform.npu.ExternalEvent()
        if not self._created_at_once:
            gate.record(self.stream)
            gate.reset(self.stream)
        return gate

    def event(self) -> Event:
        """A closed event for `Platform.event`."""
        gate = self.take()
        if not self._created_at_once and not self._platform.is_capturing():
            self.stream.synchronize()
        return ExternalEvent(gate, self._platform, closes=self._created_at_once)

    def before_first_wait(self, stream: Any) -> None:
        """Put `stream` and the update stream behind the resets of `take`."""
        if not self._created_at_once:
            stream.wait_stream(self.stream)
            self._platform.update_stream.wait_stream(self.stream)


class ExternalEvent:
    """An external event of the platform: a wait closes it as it passes, and the host sees nothing of it."""

    def __init__(self, event: Any, platform: NpuPlatform, closes: bool) -> None:
        """closes: the vendor's own wait closes the event."""
        self._event, self._platform, self._closes = event, platform, closes

    def record(self, stream: Any = None) -> None:
        self._event.record(self._platform.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        stream = self._platform.current_stream() if stream is None else stream
        self._event.wait(stream)
        if not self._closes:
            self._event.reset(stream)

    def query(self, end_event: Any = None) -> Any:
        """Refused, as is all that the host asks: the runtime refuses it, and torch_npu answers at once all the same."""
        raise UnsupportedError(
            "an external event of an NPU can't be queried, timed, or waited for by the host: let a stream wait for it"
        )

    synchronize = elapsed_time = query

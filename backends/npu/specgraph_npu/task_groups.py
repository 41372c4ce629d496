"""Captured tasks whose host parameters are rewritten while their graph runs, and the gates that make it safe.

For each group the graph waits at an external event, the gate, before the group's tasks. A round is

    replay stream   launch graph i ............... | graph i: ... gate ] group tasks ...      record done(i)
    update stream   wait done(i - 1) | update group | open gate | next group ...

The gate is a semaphore that the graph closes again as it passes, so one update a replay, no more and no less. The
wait for done(i - 1) keeps round i's update from reaching a group, or its gate, while replay i - 1 still needs them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specgraph.errors import CaptureError, UpdateError

if TYPE_CHECKING:
    from specgraph_npu.graph import NpuGraph
    from specgraph_npu.platform import NpuPlatform


@dataclass(slots=True, eq=False)
class NpuTaskGroup:
    """One captured task group: its runtime handle, its gate, and the graph it is in."""

    graph: NpuGraph
    number: int
    gate: Any
    handle: Any = None
    updates: int = 0
    """Updates since the graph's last launch: 1 is right when the next one comes."""

    def __str__(self) -> str:
        return f"task group {self.number} of {len(self.graph.groups)} in graph {self.graph.number}"


@contextmanager
def capture_group(platform: NpuPlatform, graph: NpuGraph) -> Generator[NpuTaskGroup]:
    """Gate and collect the tasks issued in the block; see `Platform.task_group`."""
    npu = platform.npu
    stream = npu.current_stream()
    group = NpuTaskGroup(graph, len(graph.groups), platform.gates.take())
    if not group.gate.npu_event:
        raise CaptureError(
            f"the gate of {group} does not exist in the runtime yet: torch_npu would drop its captured wait without a "
            "word, and replays would run with stale parameters"
        )
    group.gate.wait(stream)
    group.gate.reset(stream)
    npu.graph_task_group_begin(stream)
    try:
        yield group
        group.handle = npu.graph_task_group_end(stream)
    except RuntimeError as error:
        raise CaptureError(f"a task group can't be captured: {_reason(error)}") from error
    graph.groups.append(group)


@contextmanager
def update_group(platform: NpuPlatform, group: NpuTaskGroup) -> Generator[None]:
    """Re-issue a group's ops in the block, then open its gate; see `Platform.task_update`."""
    graph, npu, stream = group.graph, platform.npu, platform.update_stream
    if graph.is_closed or not graph.is_captured:
        raise UpdateError(f"{group}: its graph was {'closed' if graph.is_closed else 'reset'}; capture again")
    stands = bool(graph.launches) and not group.updates
    with npu.stream(stream):
        graph.order_updates(stream)
        npu.graph_task_update_begin(stream, group.handle)
        try:
            yield
        except BaseException:
            _void_update(platform)
            if stands:
                _open_gate(platform, group)
            raise
        if not stands:
            _void_update(platform)
            done = "was updated already since its graph's last launch" if graph.launches else "was not launched yet"
            raise UpdateError(
                f"{group} {done}: its gate would stay open, and the next replay would pass it before its update. "
                "Replay first, then issue one update"
            )
        try:
            npu.graph_task_update_end(stream)
        except RuntimeError as error:
            _open_gate(platform, group)
            raise UpdateError(
                f"{group}: the update does not fit what was captured, and the graph runs with its old parameters: "
                f"{_reason(error)}"
            ) from error
        _open_gate(platform, group)
    platform.counters.task_updates += 1


def _open_gate(platform: NpuPlatform, group: NpuTaskGroup) -> None:
    """Let the graph pass. After a failed update too: an error to the caller is better than a graph that stands."""
    group.gate.record(platform.update_stream)
    group.updates += 1
    platform.counters.event_records += 1


def _void_update(platform: NpuPlatform) -> None:
    """End an update so that it rewrites nothing: with one op more than was captured, the runtime refuses it."""
    platform.scratch.sin_()
    try:
        platform.npu.graph_task_update_end(platform.update_stream)
    except RuntimeError:
        return


def _reason(error: Exception) -> str:
    """The runtime's own sentence out of torch_npu's report, or its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("[simulated", "EZ", "EE", "The "))]
    return (telling or lines or [type(error).__name__])[0]


reason_of = _reason

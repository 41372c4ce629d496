"""A timeline of some rounds in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

What the host does is marked with ranges of torch's profiler, and what the device does is what that profiler records:
one clock for both. On the `cpu` platform the ops of a graph run on the host, and are shown as the graph's contents.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from specgraph.capture import BatchDescriptor, HostCopy, Pass
from specgraph.capture.update_plan import UpdatePlan
from specgraph.device import Graph, Platform
from specgraph.engine import SpeculativeDecoder
from specgraph.engine.request import Request

_MARK = "specgraph|"
_HOST, _DEVICE = 1, 2
_TRACKS = {
    "rounds": "round", "passes": "pass", "launches": "launch", "graphs": "graph", "task updates": "task update",
    "waits": "wait", "eager ops": "eager op", "contents of graphs": "op in a graph",
}  # fmt: skip
"""Rows of the host, from top to bottom, and the category of their events. What a graph holds is here only where the
host runs it; a device shows its kernels in rows of its own."""

_PASSES = {"target": ("prefill", "verify"), "drafter": ("prefill", "propose"), "round": ("launch",)}
"""Methods of each runner of a decoder that run a pass."""

_SHORTEST = 0.001
"""Microseconds: a slice of no length would not be seen."""

_ROWS = {track: row for row, track in enumerate(_TRACKS)}


def trace(decoder: SpeculativeDecoder, requests: Iterable[Request], rounds: int) -> dict[str, Any]:
    """Run some rounds under the profiler.

    Args:
        decoder: captured, and without unfinished requests.
        requests: to generate for; those that don't fit at once join later. Still unfinished ones are cancelled.
        rounds: to run at most; the first one prefills.

    Returns:
        An object in Chrome's trace format. Events of category "round" carry in `args` the round's graph launches by
        model and phase, and what the platform counted: task updates, event records (where tasks are updated, the gates
        that a replay waits at), synchronises.
    """
    activities = list(supported_activities())
    with profile(activities=activities, acc_events=True):  # the first use of a profiler takes a second
        decoder.platform.synchronize()
    ids = [decoder.add(request) for request in requests]
    counts: list[dict[str, int]] = []
    with (
        torch.inference_mode(),
        _marked(decoder),
        profile(activities=activities, acc_events=True) as p,
    ):
        for number in range(rounds):
            if not decoder.num_unfinished:
                break
            before = _counted(decoder)
            with record_function(f"{_MARK}rounds|round {number}"):
                decoder.step()
            after = _counted(decoder)
            counts.append({name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)})
        with record_function(f"{_MARK}waits|wait for the device"):
            decoder.platform.synchronize()
    for request_id in ids:
        decoder.cancel(request_id)
    decoder.step()
    return timeline(decoder.platform, list(p.events() or []), counts)


def timeline(platform: Platform, events: list[Any], counts: list[dict[str, int]]) -> dict[str, Any]:
    """Return what the profiler saw, in Chrome's trace format; counts: of every round."""
    lanes = _lanes([event for event in events if _on_device(event)])
    slices = _slices(events, counts, lanes)
    return {"traceEvents": [*_names(platform, sorted(set(lanes.values()))), *slices], "displayTimeUnit": "ms"}


def _counted(decoder: SpeculativeDecoder) -> dict[str, int]:
    """Graph launches by model and phase, and what the platform counts, since the start."""
    launches = {
        f"launches of {name} {phase}": count
        for name, runner in decoder.runners.items()
        for phase, count in runner.launches.items()
    }
    return {**decoder.platform.counts(), **launches}


@contextmanager
def _marked(decoder: SpeculativeDecoder) -> Generator[None]:
    """Within the block, calls that a reader knows from ARCHITECTURE.md are ranges of the profiler."""
    with ExitStack() as undo:

        def mark(owner: Any, name: str, track: str, title: str | Callable[..., str | None]) -> None:
            """title: the range's, or what gives it for a call's arguments; None for no range."""
            call = getattr(owner, name)

            @wraps(call)
            def marked(*args: Any, **kwargs: Any) -> Any:
                shown = title if isinstance(title, str) else title(*args)
                if shown is None:
                    return call(*args, **kwargs)
                with record_function(f"{_MARK}{track}|{shown}"):
                    return call(*args, **kwargs)

            own = vars(owner).get(name)
            setattr(owner, name, marked)
            undo.callback(delattr, owner, name) if own is None else undo.callback(setattr, owner, name, own)

        for name, runner in decoder.runners.items():
            for method in _PASSES[name]:
                mark(runner, method, "passes", f"{name}: {'round' if method == 'launch' else method}")
            mark(runner, "run", "launches", partial(_one_launch, name))
            if runner.graphs is not None:
                mark(runner.graphs, "replay", "launches", partial(_launched, name))
        mark(Graph, "replay", "graphs", "graph")
        for method in ("apply", "apply_in_order"):
            mark(UpdatePlan, method, "task updates", _updated)
        mark(HostCopy, "read", "waits", "wait for the tokens")
        yield


def _launched(model: str, batch: BatchDescriptor, *_: Any) -> str:
    return f"{model}: {batch}"


def _one_launch(model: str, ready: Pass, *_: Any) -> str | None:
    return None if ready.graph is None else _launched(model, ready.batch)


def _updated(plan: UpdatePlan, *_: Any) -> str:
    return f"update {len(plan.keys)} ops"


def _on_device(event: Any) -> bool:
    return event.device_type.name != "CPU" and not event.name.startswith(_MARK)  # ranges are repeated on the device


def _lanes(work: list[Any]) -> dict[int, tuple[int, int]]:
    """(stream, lane) of each piece of device work, by id. Perfetto draws only slices of a row that nest, and kernels of
    one stream overlap where the next one may start early: those go into further lanes of their stream."""
    ends: dict[int, list[float]] = {}
    found: dict[int, tuple[int, int]] = {}
    for event in sorted(work, key=lambda each: each.time_range.start):
        stream, start = int(event.device_resource_id), event.time_range.start
        lanes = ends.setdefault(stream, [])
        lane = next((number for number, end in enumerate(lanes) if end <= start), len(lanes))
        lanes[lane : lane + 1] = [max(event.time_range.end, start + _SHORTEST)]
        found[id(event)] = (stream, lane)
    return found


def _slices(
    events: list[Any], counts: list[dict[str, int]], lanes: dict[int, tuple[int, int]]
) -> Generator[dict[str, Any]]:
    """Yield one complete event per range, per op outside of other ops, and per piece of device work."""
    numbers, rows = iter(counts), {place: row for row, place in enumerate(sorted(set(lanes.values())))}
    for event in sorted(events, key=lambda each: each.time_range.start):
        if event.device_type.name != "CPU":
            if id(event) in lanes:
                yield _slice(event, event.name, "device", _DEVICE, rows[lanes[id(event)]])
            continue
        if event.name.startswith(_MARK):
            _, track, name = event.name.split("|", 2)
            args = next(numbers, {}) if track == "rounds" else {}
            yield _slice(event, name, _TRACKS[track], _HOST, _ROWS[track], args)
            continue
        around = event.cpu_parent
        if around is not None and around.name.startswith(_MARK):
            track = "contents of graphs" if around.name.startswith(f"{_MARK}graphs") else "eager ops"
            yield _slice(event, event.name, _TRACKS[track], _HOST, _ROWS[track])


def _slice(event: Any, name: str, category: str, process: int, row: int, args: Any = None) -> dict[str, Any]:
    start, end = event.time_range.start, event.time_range.end
    place = {"ph": "X", "ts": start, "dur": max(end - start, _SHORTEST), "pid": process, "tid": row}
    return {**place, "name": name, "cat": category, "args": args or {}}


def _names(platform: Platform, lanes: list[tuple[int, int]]) -> Generator[dict[str, Any]]:
    """Yield what Perfetto calls the processes and rows, and their order. lanes: (stream, lane) of each row of the
    device."""
    info = platform.info
    device = f"{info.name}: {info.device_name}" + (" (simulated)" if info.simulated else "")
    for process, name in ((_HOST, f"host of {device}"), *([(_DEVICE, device)] if lanes else [])):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    rows = [(_HOST, row, name) for name, row in _ROWS.items()]
    for row, (stream, lane) in enumerate(lanes):
        rows.append((_DEVICE, row, f"stream {stream}" + (f", overlapping {lane}" if lane else "")))
    for process, row, name in rows:
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": row, "args": {"sort_index": row}}

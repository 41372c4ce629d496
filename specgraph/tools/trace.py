"""A timeline of some rounds in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

The timeline is that of torch's profiler: ranges and ops of the host, and the work of the device, by one clock. Calls
that a reader knows from ARCHITECTURE.md are ranges in it: rounds, passes, launches, graphs, task updates and waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from specgraph.capture import BatchDescriptor, HostCopy, Pass
from specgraph.capture.update_plan import UpdatePlan
from specgraph.device import Graph
from specgraph.engine import SpeculativeDecoder
from specgraph.engine.request import Request

_PASSES = {"target": ("prefill", "verify"), "drafter": ("prefill", "propose"), "round": ("launch",)}
"""Methods of each runner of a decoder that run a pass."""

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events whose row is a stream of the device."""


def trace(decoder: SpeculativeDecoder, requests: Iterable[Request], rounds: int, file: Path) -> dict[str, Any]:
    """Run some rounds under the profiler, which writes `file`; return what the file holds, with the counts of rounds.

    Args:
        decoder: captured, and without unfinished requests.
        requests: to generate for; those that don't fit at once join later. Still unfinished ones are cancelled.
        rounds: to run at most; the first one prefills.

    Returns:
        An object in Chrome's trace format. The ranges of rounds carry in `args` the round's graph launches by model and
        phase, and what the platform counted: task updates, event records (where tasks are updated, the gates that a
        replay waits at), synchronises.
    """
    activities = list(supported_activities())
    with profile(activities=activities):  # the first use of a profiler takes a second
        decoder.platform.synchronize()
    ids = [decoder.add(request) for request in requests]
    counts: dict[str, dict[str, int]] = {}
    with torch.inference_mode(), _marked(decoder), profile(activities=activities) as profiler:
        for number in range(rounds):
            if not decoder.num_unfinished:
                break
            before, name = _counted(decoder), f"round {number}"
            with record_function(name):
                decoder.step()
            after = _counted(decoder)
            counts[name] = {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}
        with record_function("wait for the device"):
            decoder.platform.synchronize()
    for request_id in ids:
        decoder.cancel(request_id)
    decoder.step()
    profiler.export_chrome_trace(str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    for event in report["traceEvents"]:
        if event.get("cat") == "user_annotation":
            event["args"] |= counts.get(event["name"], {})
    report["traceEvents"] += part_overlapping(report["traceEvents"])
    return report


def part_overlapping(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move device work that begins before the work ahead of it in its stream has ended into rows of its own.

    Kernels of one stream overlap where the next one may start early, and Perfetto draws only slices of a row that nest.

    Returns:
        The names of the new rows, as events.
    """
    ends: dict[tuple[Any, Any], list[float]] = {}
    names: dict[tuple[Any, Any], dict[str, Any]] = {}
    for event in sorted((each for each in events if each.get("cat") in _DEVICE_WORK), key=lambda each: each["ts"]):
        process, stream, start = event["pid"], event["tid"], event["ts"]
        lanes = ends.setdefault((process, stream), [])
        lane = next((number for number, end in enumerate(lanes) if end <= start), len(lanes))
        lanes[lane : lane + 1] = [start + event["dur"]]
        if lane:
            event["tid"] = row = stream + 1_000_000 * lane
            name = {"name": f"stream {stream}, overlapping {lane}"}
            names[process, row] = {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "ts": 0, "args": name}
    return list(names.values())


def _counted(decoder: SpeculativeDecoder) -> dict[str, int]:
    """Return graph launches by model and phase, and what the platform counts, since the start."""
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

        def mark(owner: Any, name: str, title: str | Callable[..., str | None]) -> None:
            """title: the range's, or what gives it for a call's arguments; None for no range."""
            call = getattr(owner, name)

            @wraps(call)
            def marked(*args: Any, **kwargs: Any) -> Any:
                shown = title if isinstance(title, str) else title(*args)
                if shown is None:
                    return call(*args, **kwargs)
                with record_function(shown):
                    return call(*args, **kwargs)

            own = vars(owner).get(name)
            setattr(owner, name, marked)
            undo.callback(delattr, owner, name) if own is None else undo.callback(setattr, owner, name, own)

        for name, runner in decoder.runners.items():
            for method in _PASSES[name]:
                mark(runner, method, f"{name}: {'round' if method == 'launch' else method}")
            mark(runner, "run", partial(_one_launch, name))
            if runner.graphs is not None:
                mark(runner.graphs, "replay", partial(_launched, name))
        mark(Graph, "replay", "graph")
        for method in ("apply", "apply_in_order"):
            mark(UpdatePlan, method, _updated)
        mark(HostCopy, "read", "wait for the tokens")
        yield


def _launched(model: str, batch: BatchDescriptor, *_: Any) -> str:
    return f"launch {model}: {batch}"


def _one_launch(model: str, ready: Pass, *_: Any) -> str | None:
    return None if ready.graph is None else _launched(model, ready.batch)


def _updated(plan: UpdatePlan, *_: Any) -> str:
    return f"update {sum(map(len, plan.tasks.values()))} ops"

"""Times of single calls by the clock: of a launch and of what goes with it, while the device is idle."""

from __future__ import annotations

import ctypes
import statistics
import time
from functools import partial

import torch

from specgraph.capture import write


def spread(nanoseconds):
    """Least, median and the value that 9 of 10 are below, in microseconds."""
    ordered = sorted(nanoseconds)
    found = {"least": ordered[0], "median": statistics.median(ordered), "p90": ordered[len(ordered) * 9 // 10]}
    return {name: round(value / 1e3, 2) for name, value in found.items()}


def repeated(call, repeats=300, before=None, left_out=20):
    """Times of single calls, the first of which are left out."""
    found = []
    for _ in range(repeats + left_out):
        if before is not None:
            before()
        start = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - start)
    return spread(found[left_out:])


def fixed_work():
    """Python that is the same on each machine, to compare machines by."""
    total = 0
    for i in range(1000):
        total += i * i
    return total


def waits(platform):
    """What runs before a timed call, by name: nothing, or a wait of some milliseconds as a larger target makes it."""
    found = {"none": None, "3 ms asleep": partial(time.sleep, 0.003)}
    if platform.device.type == "cuda":
        event = platform.event()

        def wait():
            torch.cuda._sleep(5_000_000)  # clock cycles: about 3 ms
            event.record(platform.current_stream())
            event.synchronize()

        found["3 ms of the device"] = wait
    return found


def device_calls(platform):
    """Single calls of a launch and of what goes with it, the device idle before each."""
    from cuda.bindings import driver as cu

    found, driver = {}, ctypes.CDLL("libcuda.so.1")
    stream, event = platform.current_stream(), platform.event()
    event.record(stream)
    idle = platform.synchronize
    handle = ctypes.c_void_p(stream.cuda_stream)
    for nodes in (1, 180, 360):
        x = torch.zeros(256, device=platform.device)
        graph = platform.graph()
        x.add_(1)
        with graph.capture():
            for _ in range(nodes):
                x.add_(1)
        executable = graph.executable()
        ways = {
            "Graph.replay": graph.replay,
            "torch's replay": graph._graph.replay,
            "cuda.bindings": lambda exe=executable: cu.cuGraphLaunch(exe, stream.cuda_stream),
            "ctypes": partial(driver.cuGraphLaunch, ctypes.c_void_p(executable), handle),
        }
        graph.replay()
        found |= {f"{nodes} nodes: {name}": repeated(call, before=idle) for name, call in ways.items()}

        def behind():
            graph.replay()  # noqa: B023

        found[f"{nodes} nodes: Graph.replay behind another one"] = repeated(graph.replay, 100, behind)
        idle()
        graph.close()
    words, numbers = torch.zeros(96, dtype=torch.int64, device=platform.device), list(range(96))
    ready, raw = platform.event(), ctypes.c_void_p(event.cuda_event)
    ready.record(stream)
    idle()
    found |= {
        "write of 96 numbers": repeated(lambda: write(words, numbers), before=idle),
        "fill_ of a view": repeated(lambda: words[3].fill_(1), before=idle),
        "current_stream": repeated(platform.current_stream),
        "event.record(stream)": repeated(lambda: event.record(stream), before=idle),
        "event.record, ctypes": repeated(lambda: driver.cuEventRecord(raw, handle), before=idle),
        "event.query, done": repeated(ready.query),
        "event.synchronize, done": repeated(ready.synchronize),
        "event.synchronize, done, ctypes": repeated(
            lambda: driver.cuEventSynchronize(ctypes.c_void_p(ready.cuda_event))
        ),
    }
    return found

"""Where the host's time of a round goes (lowering `round`), part by part.

    python benchmarks/round_host_time.py --platform cuda --json benchmarks/results/h200-round-host-time.json

Microseconds by the clock (`time.perf_counter_ns`): least, median and the value that 9 of 10 are below. `clock`: what
the clocks themselves take, and a loop of fixed work in Python to compare machines by. `calls` (CUDA only): single calls
while the device is idle. `no_device`: a step of the decoder on the `cpu` platform whose launch only writes the ring, so
what is left is Python; also right after a wait of some milliseconds, as rounds of a larger target have them. `rounds`:
steps in which nobody joins or ends, without the time in `HostCopy.read`; per round, over stretches of 24 rounds; the
ways in turns. `parts`: single methods in such steps, each timed alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import shlex
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from one_launch_per_round import TARGETS, K, random_decoders

from specgraph import Request, load_generator, open_platform
from specgraph.benchmarking.decoding import PROMPTS
from specgraph.decoding.device_rounds import DeviceRounds
from specgraph.decoding.steady_rounds import SteadyRounds
from specgraph.graphs import GraphRunner
from specgraph.runner import HostCopy, write

LEAD, ROUNDS = 12, 24
"""Rounds before a timed stretch, and in it."""
PARTS = (
    (GraphRunner, "replay"), (HostCopy, "start"), (HostCopy, "read"), (DeviceRounds, "_launch"),
    (DeviceRounds, "_send"), (DeviceRounds, "_receive"), (DeviceRounds, "_hand_out"), (SteadyRounds, "take"),
    (SteadyRounds, "_append"),
)  # fmt: skip


def spread(nanoseconds):
    """Least, median and the value that 9 of 10 are below, in microseconds."""
    ordered = sorted(nanoseconds)
    found = {"least": ordered[0], "median": statistics.median(ordered), "p90": ordered[len(ordered) * 9 // 10]}
    return {name: round(value / 1e3, 2) for name, value in found.items()}


def repeated(call, repeats=300, before=None):
    """Times of single calls, the first 20 left out."""
    found = []
    for _ in range(repeats + 20):
        if before is not None:
            before()
        start = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - start)
    return spread(found[20:])


def loop():
    """Work that is the same on each machine."""
    total = 0
    for i in range(1000):
        total += i * i
    return total


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


def without_device(requests, waits):
    """Steps of a decoder whose launch writes the ring and nothing else, by what runs before each step, untimed."""
    with load_generator(
        platform="cpu", num_speculative_tokens=K, max_num_requests=requests, capture_sizes=[requests], lowering="round"
    ) as generator, torch.inference_mode():  # fmt: skip
        decoder = generator.decoder
        for _ in range(requests):
            decoder.add(Request(prompt_token_ids=[5, 6, 7], max_tokens=200))
        for _ in range(4):
            decoder.step()
        rounds, outputs = decoder.rounds, decoder.rounds.outputs
        ring, behind = outputs.ring.numpy(), outputs.memory.sampled_token_ids.shape[0]
        counts = np.array([i % 3 + 1 for i in range(requests)], np.int32)
        number = [rounds.num_rounds]

        def launch(found):
            number[0] += 1
            slot = ring[(number[0] - 1) % outputs.num_slots]
            slot[:behind] = 9
            slot[behind:-2].view(np.int32)[:requests] = counts
            slot[-2:] = number[0], 0

        rounds.runner.launch = launch
        for state in rounds.running:
            state.limit = 10**9
        rows = {}
        for name, between in waits.items():
            found = []
            for _ in range(400 if between is None else 64):
                if between is not None:
                    between()
                start = time.perf_counter_ns()
                decoder.step()
                found.append(time.perf_counter_ns() - start)
            rows[name] = {**spread(found[32:]), "mean": round(statistics.mean(found[32:]) / 1e3, 2)}
        return rows


def stretch(decoder, rounds):
    """Host, wait and whole time of a round in microseconds, over steps in which nobody joins or ends."""
    waited, read = [0], HostCopy.read

    def timed(self):
        start = time.perf_counter_ns()
        result = read(self)
        waited[0] += time.perf_counter_ns() - start
        return result

    HostCopy.read = timed
    start = time.perf_counter_ns()
    for _ in range(rounds):
        decoder.step()
    decoder.rounds.running  # noqa: B018 - brings the requests' tokens up to date
    wall = time.perf_counter_ns() - start
    HostCopy.read = read
    return {"host": wall - waited[0], "wait": waited[0], "round": wall}


def cpu_time(decoder, rounds):
    """As `stretch`, by the thread's CPU time; its clock is a system call, which counts here."""
    waited, read = [0], HostCopy.read

    def timed(self):
        start = time.thread_time_ns()
        result = read(self)
        waited[0] += time.thread_time_ns() - start
        return result

    HostCopy.read = timed
    start = time.thread_time_ns()
    for _ in range(rounds):
        decoder.step()
    decoder.rounds.running  # noqa: B018
    cpu = time.thread_time_ns() - start
    HostCopy.read = read
    return cpu - waited[0]


def part(decoder, owner, name, steps=32):
    """Times of one method in `steps` steps."""
    found, real = [], getattr(owner, name)

    def timed(*args, **options):
        start = time.perf_counter_ns()
        result = real(*args, **options)
        found.append(time.perf_counter_ns() - start)
        return result

    setattr(owner, name, timed)
    for _ in range(steps):
        decoder.step()
    setattr(owner, name, real)
    return {**spread(found), "per step": round(len(found) / steps, 2)} if found else None


def measure(platform, decoders, prompts, stretches):
    """The times of each decoder, in turns; requests join anew for each stretch."""
    found, first = {name: [] for name in decoders}, next(iter(decoders))
    for _ in range(stretches):
        for name in random.sample(list(decoders), len(decoders)):
            with running(decoders[name], prompts):
                times = stretch(decoders[name], ROUNDS)
                times["host_cpu"] = cpu_time(decoders[name], ROUNDS)
            with running(decoders[name], prompts), polling():
                polled = stretch(decoders[name], ROUNDS)
                found[name].append({**times, **{f"{what}_polled": value for what, value in polled.items()}})
    rows = {}
    for name, all_of in found.items():
        rows[name] = {f"{what}_us": spread([each[what] / ROUNDS for each in all_of]) for what in all_of[0]}
    rows[first]["parts"] = {}
    for owner, method in PARTS:
        with running(decoders[first], prompts):
            rows[first]["parts"][f"{owner.__name__}.{method}"] = part(decoders[first], owner, method)
    return rows


@contextmanager
def polling():
    """Waits for copies ask the event again and again, in Python."""
    real = HostCopy.read

    def read(self):
        if not self._is_waited_for:
            while not self._copied.query():
                pass
            self._is_waited_for = True
        return self._result

    HostCopy.read = read
    yield
    HostCopy.read = real


@contextmanager
def running(decoder, prompts):
    """A request for each prompt, of which none ends within; some rounds have run."""
    tokens = (LEAD + 2 * ROUNDS + 12) * (K + 1)
    ids = [decoder.add(Request(prompt_token_ids=prompt, max_tokens=tokens)) for prompt in prompts]
    for _ in range(LEAD):
        decoder.step()
    yield
    for request_id in ids:
        decoder.cancel(request_id)
    while decoder.num_unfinished:
        decoder.step()


def shipped(platform, requests, launches, stretches):
    """Rows of the shipped pair."""
    generators = {
        f"{n} per launch": load_generator(
            platform=platform, num_speculative_tokens=K, max_num_requests=requests, capture_sizes=[requests],
            lowering="round", rounds_per_launch=n,
        )
        for n in launches
    }  # fmt: skip
    decoders = {name: generator.decoder for name, generator in generators.items()}
    first = next(iter(generators.values()))
    prompts = [first.request(PROMPTS[i % len(PROMPTS)]).prompt_token_ids for i in range(requests)]
    rows = measure(platform, decoders, prompts, stretches)
    for generator in generators.values():
        generator.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform")
    parser.add_argument("--cases", default="shipped:1,shipped:8,shipped:32,shipped:64,llama-1b:8,llama3-8b:1")
    parser.add_argument("--launches", default="1,2,4", help="rounds per launch")
    parser.add_argument("--stretches", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform = open_platform(asked.platform)
    on_cuda, cache = platform.device.type == "cuda", {}
    report = {
        "command": shlex.join(["python", "benchmarks/round_host_time.py", *sys.argv[1:]]),
        "device": platform.info.device_name,
        "versions": dict(platform.info.versions),
    }

    def keep(name, found):
        report[name] = found
        print(name, json.dumps(found), flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(report, indent=1) + "\n")

    clocks = {"perf_counter_ns": time.perf_counter_ns, "thread_time_ns": time.thread_time_ns, "loop of 1000": loop}
    keep("clock", {name: repeated(call, 2000) for name, call in clocks.items()})
    waits = {"none": None, "3 ms asleep": partial(time.sleep, 0.003)}
    if on_cuda:
        keep("calls", device_calls(platform))
        event = platform.event()

        def wait():
            torch.cuda._sleep(5_000_000)  # clock cycles: about 3 ms
            event.record(platform.current_stream())
            event.synchronize()

        def poll():
            torch.cuda._sleep(5_000_000)
            event.record(platform.current_stream())
            while not event.query():
                pass

        waits |= {"3 ms of the device": wait, "3 ms of the device, polled": poll}
    keep("no_device", {n: without_device(n, waits) for n in (1, 64)})
    ways = {f"{n} per launch": {"lowering": "round", "rounds_per_launch": int(n)} for n in asked.launches.split(",")}
    dtype = torch.bfloat16 if on_cuda else torch.float32
    with torch.inference_mode():
        for case in asked.cases.split(","):
            name, _, requests = case.partition(":")
            if name == "shipped":
                rows = shipped(platform, int(requests), [int(n) for n in asked.launches.split(",")], asked.stretches)
            else:
                length = TARGETS[name][2] + (LEAD + 2 * ROUNDS + 60) * (K + 1)
                made = random_decoders(platform, name, int(requests), dtype, length, ways, cache)
                rows = measure(platform, *made, asked.stretches)
                for decoder in made[0].values():
                    decoder.close()
            keep(case, rows)


if __name__ == "__main__":
    main()

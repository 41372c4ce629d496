"""Where the host's time of a round goes (lowering `round`), part by part.

    python benchmarks/round_host_time.py --platform cuda --launches 1 --turns 6 --json FILE

Microseconds by the clock (`time.perf_counter_ns`): least, median and the value that 9 of 10 are below. `clock`: what
the clocks themselves take, and a loop of fixed work in Python to compare machines by. `calls` (CUDA only): single calls
while the device is idle. `no_device`: a step of the decoder on the `cpu` platform whose launch only writes the ring, so
what is left is Python; also right after a wait of some milliseconds, as rounds of a larger target have them. `rounds`:
steps in which nobody joins or ends, without the time in `HostCopy.read`, and with what brings the requests' tokens up
to date after them; per round, over stretches of 24 rounds. All decoders are captured first; then cases and ways take
turns, so that a slow phase of a shared machine is in some stretches of every case. Before each turn the host's thread
moves to the core where the loop of fixed work takes least (`cores`), away from neighbours on the same physical core.
`collections`: of Python's garbage collector in those stretches. `parts`: single methods in such steps, timed alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shlex
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from one_launch_per_round import TARGETS, K, random_decoders
from single_calls import device_calls, fixed_work, repeated, spread, waits

from specgraph import Request, load_generator, open_platform
from specgraph.capture import HostCopy
from specgraph.device import Graph
from specgraph.engine.device_rounds import DeviceRounds
from specgraph.engine.steady_rounds import SteadyRounds
from specgraph.tools.decoding import PROMPTS

LEAD, ROUNDS, STRETCHES = 12, 24, 3
"""Rounds after requests have joined that are not timed, rounds of a timed stretch, and such stretches."""
ALL_CASES = ",".join(f"{name}:{n}" for name in ("shipped", *TARGETS) for n in (1, 8, 32, 64))
PARTS = (
    (Graph, "replay"), (HostCopy, "start"), (HostCopy, "read"), (DeviceRounds, "_launch"), (DeviceRounds, "_send"),
    (DeviceRounds, "_receive"), (DeviceRounds, "_hand_out"), (SteadyRounds, "take"), (SteadyRounds, "fold"),
)  # fmt: skip


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
        tokens = np.where(np.arange(K + 1) < counts[:, None], 9, -1).ravel()
        number = [rounds.num_rounds]

        def launch():
            number[0] += 1
            slot = ring[(number[0] - 1) % outputs.num_slots]
            slot[:behind] = tokens
            slot[behind:-2].view(np.int32)[:requests] = counts
            slot[-2:] = number[0], 0

        rounds.runner.dispatch(requests, K + 1).graph._launch = launch
        for state in rounds.running:
            state.limit = 10**9
        return {
            name: repeated(decoder.step, 400 if between is None else 64, between, left_out=32)
            for name, between in waits.items()
        }


@contextmanager
def replaced(owner, name, make):
    """In this block a method is what `make` gives for it."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    yield
    setattr(owner, name, real)


def stretch(decoder, rounds):
    """Host, wait and whole time of a round in nanoseconds, over steps in which nobody joins or ends."""
    waited = [0]

    def timed(read):
        def call(self):
            start = time.perf_counter_ns()
            result = read(self)
            waited[0] += time.perf_counter_ns() - start
            return result

        return call

    collections = sum(each["collections"] for each in gc.get_stats())
    with replaced(HostCopy, "read", timed):
        start = time.perf_counter_ns()
        for _ in range(rounds):
            decoder.step()
        steps = time.perf_counter_ns() - start
        decoder.rounds.running  # noqa: B018 - brings the requests' tokens up to date
        wall = time.perf_counter_ns() - start
    collections = sum(each["collections"] for each in gc.get_stats()) - collections
    times = {"host": wall - waited[0], "host_steps": steps - waited[0], "wait": waited[0], "round": wall}
    return {name: value / rounds for name, value in times.items()}, collections


def part(decoder, owner, name, steps=32):
    """Times of one method in `steps` steps."""
    found = []

    def timed(real):
        def call(*args, **options):
            start = time.perf_counter_ns()
            result = real(*args, **options)
            found.append(time.perf_counter_ns() - start)
            return result

        return call

    with replaced(owner, name, timed):
        for _ in range(steps):
            decoder.step()
    return {**spread(found), "per step": round(len(found) / steps, 2)} if found else None


def measure(cases, turns):
    """The times of each case's decoders, in turns; requests join anew each time.

    Args:
        cases: by name, decoders by way, and prompts for their requests.
    """
    found = {(case, way): [] for case, (decoders, _) in cases.items() for way in decoders}
    cores, allowed = {key: [] for key in found}, sorted(os.sched_getaffinity(0))
    for _ in range(turns):
        for case, way in random.sample(list(found), len(found)):
            decoders, prompts = cases[case]
            cores[case, way].append(stay_on_the_quietest_core(allowed))
            with running(decoders[way], prompts):
                found[case, way] += [stretch(decoders[way], ROUNDS) for _ in range(STRETCHES)]
    rows = {case: {} for case in cases}
    for (case, way), all_of in found.items():
        times = all_of[0][0] if all_of else ()
        row = rows[case][way] = {f"{what}_us": spread([each[what] for each, _ in all_of]) for what in times}
        row["host_us_of_stretches"] = [round(each["host"] / 1e3, 1) for each, _ in all_of]
        row |= {"collections": sum(count for _, count in all_of), "cores": cores[case, way]}
    os.sched_setaffinity(0, allowed)
    return rows


def times_of_parts(decoder, prompts):
    """Times of single methods in steps of one decoder."""
    found = {}
    for owner, method in PARTS:
        with running(decoder, prompts):
            found[f"{owner.__name__}.{method}"] = part(decoder, owner, method)
    return found


def stay_on_the_quietest_core(allowed, repeats=30):
    """Keep this thread on the core where a fixed loop takes least; the core and the loop's time there and on all."""
    found = {}
    for core in allowed:
        os.sched_setaffinity(0, {core})
        found[core] = repeated(fixed_work, repeats, left_out=5)["median"]
    core = min(found, key=found.__getitem__)
    os.sched_setaffinity(0, {core})
    return {"core": core, "loop_us": found[core], "slowest_core_us": max(found.values())}


@contextmanager
def running(decoder, prompts):
    """A request for each prompt, of which none ends within; some rounds have run."""
    tokens = (LEAD + STRETCHES * ROUNDS + 12) * (K + 1)
    ids = [decoder.add(Request(prompt_token_ids=prompt, max_tokens=tokens)) for prompt in prompts]
    for _ in range(LEAD):
        decoder.step()
    yield
    for request_id in ids:
        decoder.cancel(request_id)
    while decoder.num_unfinished:
        decoder.step()


def shipped(platform, requests, launches):
    """Decoders of the shipped pair by rounds per launch, and prompts for their requests."""
    generators = [
        load_generator(
            platform=platform, num_speculative_tokens=K, max_num_requests=requests, capture_sizes=[requests],
            lowering="round", rounds_per_launch=n,
        )
        for n in launches
    ]  # fmt: skip
    prompts = [generators[0].request(PROMPTS[i % len(PROMPTS)]).prompt_token_ids for i in range(requests)]
    return {f"{n} per launch": made.decoder for n, made in zip(launches, generators, strict=True)}, prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform")
    parser.add_argument("--cases", default=ALL_CASES)
    parser.add_argument("--launches", default="1,2,4", help="rounds per launch")
    parser.add_argument("--turns", type=int, default=3, help="how often requests of each case join anew")
    parser.add_argument("--parts", default="", help="cases whose parts are timed too")
    parser.add_argument("--no-calls", dest="calls", action="store_false", help="only rounds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform, cache = open_platform(asked.platform), {}
    on_cuda = platform.device.type == "cuda"
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

    if asked.calls:
        clocks = {"perf_counter_ns": time.perf_counter_ns, "loop of 1000": fixed_work}
        keep("clock", {name: repeated(call, 2000) for name, call in clocks.items()})
        if on_cuda:
            keep("calls", device_calls(platform))
        keep("no_device", {n: without_device(n, waits(platform)) for n in (1, 64)})
    launches, dtype = [int(n) for n in asked.launches.split(",")], torch.bfloat16 if on_cuda else torch.float32
    ways = {f"{n} per launch": {"lowering": "round", "rounds_per_launch": n} for n in launches}
    cases, start = {}, time.perf_counter()
    with torch.inference_mode():
        for case in asked.cases.split(","):
            name, _, requests = case.partition(":")
            if name == "shipped":
                cases[case] = shipped(platform, int(requests), launches)
            else:
                length = TARGETS[name][2] + (LEAD + STRETCHES * ROUNDS + 60) * (K + 1)
                cases[case] = random_decoders(platform, name, int(requests), dtype, length, ways, cache)
            print(f"{time.perf_counter() - start:.0f} s {case} captured", flush=True)
        keep("rows", measure(cases, asked.turns))
        for case in filter(None, asked.parts.split(",")):
            decoders, prompts = cases[case]
            keep(f"parts of {case}", times_of_parts(next(iter(decoders.values())), prompts))
        for decoders, _ in cases.values():
            for decoder in decoders.values():
                decoder.close()


if __name__ == "__main__":
    main()

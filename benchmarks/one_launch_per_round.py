"""Times rounds as one launch (lowering `round`) against verify and propose apart (`merged`).

python benchmarks/one_launch_per_round.py --platform cuda --json benchmarks/results/h100-round.json

Rows: the shipped pair, and targets of a 1B and an 8B Llama's shape with EAGLE-3 heads, random weights and synthetic
acceptance 0.7; K = 5; the ways in turns in one run, medians over stretches of 20 rounds in which nobody joins or ends.
`round_us` is the time of such a round. `tokens_per_second` is the expected tokens of a round over it; of the shipped
pair it is measured over whole requests. `host_us_per_round` is the CPU time of the thread in `step` outside of waits
for a copy, with what brings the requests' tokens up to date; nobody reads the chunks of these rounds, as in `generate`.
`host_us_per_round_read` is the time where they are read, as by a caller who streams, of which `launch_us_per_round` is
spent in graph launches.
`host_wall_us_per_round`, `launch_wall_us_per_round` and `wait_us_per_round` are by the clock. `launches_per_round`,
`uploads_per_round`, `waits_per_round`, `kernels_per_round`, `memsets_per_round` and `gap_us` (median time between the
last kernel of a graph and the first one of the next, on the device) are from a profiler's trace, on CUDA only, which is
taken when all times are.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

import torch
from python_prompts import PROMPTS
from torch.profiler import ProfilerActivity, profile

from specgraph import load_generator, open_platform
from specgraph.capture import HostCopy
from specgraph.device import Graph
from specgraph.engine import Request
from specgraph.tools.rounds import captured_decoder, random_target
from specgraph.tools.shapes import SHAPES, random_head

K, ACCEPTANCE = 5, 0.7
WAYS = {"merged": {"decode": "merged"}, "round": {"decode": "round"}}
"""Options of each way, by its name in the rows."""
EIGHT_B = replace(SHAPES["eagle3-llama3-8b"], num_layers=1)
ONE_B = replace(EIGHT_B, hidden_size=2048, intermediate_size=8192, head_dim=64)
TARGETS = {"llama-1b": (ONE_B, 16, 256), "llama3-8b": (EIGHT_B, 32, 512)}
"""Head, layers of the target, tokens of each prompt."""
LEAD = 8
"""Steps before each timed stretch: those of two launches."""
spent = Counter()
"""Nanoseconds so far in waits for copies and graph launches, by the clock; with `_cpu` of the thread's CPU time."""


@contextmanager
def timed(owner, method, name):
    """In this block the time in the method is added to `spent`."""
    real, cpu_name = getattr(owner, method), f"{name}_cpu"

    def call(*args, **options):
        start, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = real(*args, **options)
        spent[cpu_name] += time.thread_time_ns() - cpu
        spent[name] += time.perf_counter_ns() - start
        return result

    setattr(owner, method, call)
    yield
    setattr(owner, method, real)


def stretch(decoder, rounds, *, lead=LEAD, reads=False):
    """Take `rounds` steps; times of a round in microseconds. The requests' tokens are brought up to date at the end.

    Rounds that ran ahead, while another decoder was timed, are stepped over before the clock starts (`lead`).

    Args:
        reads: read the chunks of each round, as a caller does who streams; `generate` reads none of rounds in which
            nobody joins or ends. Launches are timed too, which takes some microseconds.
    """
    for _ in range(lead):
        decoder.step()
    launched = decoder.rounds.num_rounds
    spent.clear()
    with timed(HostCopy, "read", "wait"), timed(Graph, "replay", "launch") if reads else nullcontext():
        start, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(rounds):
            chunks = decoder.step()
            if reads:
                for _chunk in chunks:
                    pass
        decoder.rounds.running  # noqa: B018
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - start
    launched = decoder.rounds.num_rounds - launched
    found = {
        "round_us": wall / rounds / 1e3,
        "host_us_per_round": (cpu - spent["wait_cpu"]) / launched / 1e3,
        "host_wall_us_per_round": (wall - spent["wait"]) / launched / 1e3,
        "wait_us_per_round": spent["wait"] / launched / 1e3,
    }
    launch = {
        "launch_us_per_round": spent["launch_cpu"] / launched / 1e3,
        "launch_wall_us_per_round": spent["launch"] / launched / 1e3,
    }
    return {**found, **launch} if reads else found


def both_stretches(decoder, rounds):
    """Times of rounds whose chunks nobody reads, and the host's time and launches of as many, and no more than 16, that
    are read."""
    read = stretch(decoder, min(rounds, 16), reads=True)
    launch = {name: value for name, value in read.items() if name.startswith("launch")}
    return {**stretch(decoder, rounds, lead=0), **launch, "host_us_per_round_read": read["host_us_per_round"]}


def count_launches(decoder):
    """Graph launches so far, by the runners' own count."""
    return sum(runner.launches.total() for runner in decoder.runners.values())


def trace(decoder, rounds=12):
    """Counts per round and the gap between graphs, from a profiler's trace of some rounds. Graph launches are the
    runners' own count: the trace does not show those by the driver's call."""
    launched, launches = decoder.rounds.num_rounds, count_launches(decoder)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds):
            decoder.step()
        torch.cuda.synchronize()
    launched = decoder.rounds.num_rounds - launched
    calls, work = Counter(), {}
    for event in profiled.profiler.kineto_results.events():
        name, start = event.name(), event.start_ns()
        if event.device_type() == torch.autograd.DeviceType.CPU:
            calls[name] += name.startswith("cu")
        else:
            calls["HtoD"] += "HtoD" in name
            calls["Memset"] += "Memset" in name
            calls["DtoH"] += "DtoH" in name
            if "Mem" not in name:
                calls["kernels"] += 1
                work.setdefault(event.correlation_id(), []).append((start, start + event.duration_ns()))
    graphs = sorted((min(s for s, _ in spans), max(e for _, e in spans)) for spans in work.values() if len(spans) > 5)
    gaps = [(after[0] - before[1]) / 1e3 for before, after in pairwise(graphs)]
    outside = calls["cudaLaunchKernel"] + calls["cudaLaunchKernelExC"] + calls["cuLaunchKernelEx"]
    busy = sum(end - start for start, end in graphs) / max(graphs[-1][1] - graphs[0][0], 1) if graphs else 0
    waits = sum(count for name, count in calls.items() if "Synchronize" in name) - 1  # the last one is the trace's own
    counted = (count_launches(decoder) - launches) / launched
    return {
        "launches_per_round": round(counted, 2),
        "kernels_outside_graphs_per_round": round(outside / launched, 2),
        "kernels_per_round": round(calls["kernels"] / launched, 1),
        "memsets_per_round": round(calls["Memset"] / launched, 1),
        "uploads_per_round": round(calls["HtoD"] / launched, 2),
        "copies_to_host_per_round": round(calls["DtoH"] / launched, 2),
        "waits_per_round": round(waits / launched, 2),
        "gap_us": round(statistics.median(gaps), 1) if gaps else None,
        "in_graphs": round(busy, 3),
    }  # fmt: skip


def medians(stretches):
    """Return each time's median over the stretches, the host's least times, and every round_us, to see their spread."""
    found = {name: round(statistics.median(each[name] for each in stretches), 1) for name in stretches[0]}
    for name in ("host", "launch"):
        found[f"{name}_us_least"] = round(min(each[f"{name}_us_per_round"] for each in stretches), 1)
    return {**found, "round_us_of_stretches": [round(each["round_us"], 1) for each in stretches]}


def compare(platform, requests, decoders, prompts, length, rounds, repeats):
    """Times of each way over the same requests; with 0 repeats its trace."""
    found, expected = {name: [] for name in decoders}, 1 + sum(accumulate([ACCEPTANCE] * K, mul))
    for decoder in decoders.values():
        for prompt in prompts:
            decoder.add(Request(prompt_token_ids=prompt, max_tokens=length - len(prompt)))
        stretch(decoder, 3)
    if not repeats:
        return {name: trace(decoder) for name, decoder in decoders.items()}
    for _ in range(repeats):
        for name in random.sample(list(decoders), len(decoders)):
            platform.synchronize()
            found[name].append(both_stretches(decoders[name], rounds))
    rows = {}
    for name, decoder in decoders.items():
        times = medians(found[name])
        rate = round(requests * expected / times["round_us"] * 1e6, 1)
        acceptance = round(decoder.metrics.mean_acceptance_length, 3)
        rows[name] = {"tokens_per_second": rate, **times, "mean_acceptance_length": acceptance}
    return rows


def random_decoders(platform, name, requests, dtype, length, ways, cache):
    """A decoder of each way for a target of random weights, and prompts for its requests.

    Args:
        length: max_model_len.
        cache: keeps the models of the last target.
    """
    shape, layers, context = TARGETS[name]
    if name not in cache:
        cache.clear()
        most = context + 600 * (K + 1)
        target = random_target(replace(shape, num_layers=layers), platform.device, dtype, most)
        cache[name] = target, random_head(shape, platform.device, dtype, most)
    target, head = cache[name]
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.vocab_size, (requests, context), generator=g).tolist()
    decoders = {}
    for name_of_way, options in ways.items():
        decoders[name_of_way] = captured_decoder(
            platform, target, head, num_speculative_tokens=K, max_num_requests=requests, max_model_len=length,
            prefill_sizes=[min(256, context)], synthetic_acceptance=ACCEPTANCE, **options,
        )  # fmt: skip
    return decoders, prompts


def random_pair(platform, name, requests, dtype, rounds, repeats, cache):
    """Each way's times with a target of random weights; with 0 repeats its trace."""
    length = TARGETS[name][2] + ((2 * rounds + LEAD) * repeats + 60) * (K + 1)
    decoders, prompts = random_decoders(platform, name, requests, dtype, length, WAYS, cache)
    rows = compare(platform, requests, decoders, prompts, length, rounds, repeats)
    for decoder in decoders.values():
        decoder.close()
    return rows


def shipped_pair(platform, requests, rounds, repeats):
    """Each way's times with the shipped pair, of whole greedy requests of 100 tokens and of rounds of long ones; with 0
    repeats its trace."""
    generators = {
        name: load_generator(
            platform=platform, num_speculative_tokens=K, max_num_requests=requests, capture_sizes=[requests], **options
        )
        for name, options in WAYS.items()
    }  # fmt: skip
    rates, found = {name: [] for name in generators}, {name: [] for name in generators}
    prompts, tokens, rows = [PROMPTS[i % len(PROMPTS)] for i in range(max(requests, len(PROMPTS)))], {}, {}
    for _ in range(repeats):
        for name in random.sample(list(generators), len(generators)):
            generator = generators[name]
            asked, results = [generator.request(prompt, max_tokens=100) for prompt in prompts], []
            start = time.perf_counter()
            for first in range(0, len(asked), requests):
                results += [each.token_ids for each in generator.generate(asked[first : first + requests])]
            rates[name].append(sum(map(len, results)) / (time.perf_counter() - start))
            assert tokens.setdefault("all", results) == results, f"{name}: other tokens"
            decoder = generator.decoder
            ids = [generator.add(generator.request(prompt, max_tokens=250)) for prompt in prompts[:requests]]
            with torch.inference_mode():
                found[name].append(both_stretches(decoder, rounds))
            for request_id in ids:
                generator.cancel(request_id)
            while decoder.num_unfinished:
                generator.step()
    for name, generator in generators.items():
        if repeats:
            rows[name] = {
                "tokens_per_second": round(statistics.median(rates[name]), 1), **medians(found[name]),
                "tokens_per_second_of_repeats": [round(rate, 1) for rate in rates[name]],
                "mean_acceptance_length": round(generator.decoder.metrics.mean_acceptance_length, 3),
            }  # fmt: skip
        else:
            for prompt in prompts[:requests]:
                generator.add(generator.request(prompt, max_tokens=250))
            for _ in range(LEAD):
                generator.step()
            with torch.inference_mode():
                rows[name] = trace(generator.decoder)
        generator.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("--targets", default=",".join(TARGETS), help="targets with random weights; empty for none")
    parser.add_argument("--no-shipped", dest="shipped", action="store_false", help="leave the shipped pair out")
    parser.add_argument("--repeats", type=int, default=5, help="timed stretches")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform = open_platform(asked.platform)
    dtype = torch.bfloat16 if platform.device.type == "cuda" else torch.float32
    info = platform.info
    report = {"command": " ".join(["python", *sys.argv]), "device": info.device_name, "versions": dict(info.versions)}
    report |= {"rows": []}

    def keep():
        if asked.json is not None:
            asked.json.write_text(json.dumps(report, indent=1) + "\n")

    start, cache, rows = time.perf_counter(), {}, {}
    shipped = ["shipped pair"] * asked.shipped
    cases = [
        (name, int(n))
        for name in (*shipped, *filter(None, asked.targets.split(",")))
        for n in asked.requests.split(",")
    ]

    def measure(repeats):
        for name, requests in cases:
            if name == "shipped pair":
                found = shipped_pair(platform, requests, 20, repeats)
            else:
                with torch.inference_mode():
                    found = random_pair(platform, name, requests, dtype, 20, repeats, cache)
            for way, row in found.items():
                key = {"target": name, "requests": requests, "lowering": way}
                rows[name, requests, way] = rows.get((name, requests, way), key) | row
            report["rows"] = list(rows.values())
            keep()
            print(f"{time.perf_counter() - start:.0f} s {name}, {requests} requests: {found}", flush=True)

    measure(asked.repeats)
    if platform.device.type == "cuda":
        measure(0)  # last: a profiler that ran once makes all later graph launches 5 to 20 times as long
    report["seconds"] = round(time.perf_counter() - start)
    keep()


if __name__ == "__main__":
    main()

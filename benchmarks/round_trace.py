"""What a profiler's trace says of a round: launches, copies, waits, kernels, and the gap between graphs (CUDA only)."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile


def count_launches(decoder):
    """Graph launches so far, by the runners' own count."""
    return sum(runner.launches.total() for runner in decoder.runners.values())


def trace(decoder, rounds=12):
    """Counts per round and the gap between graphs, from a profiler's trace of some rounds. Graph launches are the
    runners' own count: the trace does not show those by the driver's call. With several rounds per launch there is no
    gap."""
    launched, launches = decoder.rounds.num_rounds, count_launches(decoder)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds):  # three launches of four rounds
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
    if decoder.config.rounds_per_launch > 1:
        gaps, busy = [], float("nan")
    return {
        "launches_per_round": round(counted, 2),
        "kernels_outside_graphs_per_round": round(outside / launched, 2),
        "kernels_per_round": round(calls["kernels"] / launched, 1),
        "memsets_per_round": round(calls["Memset"] / launched, 1),
        "uploads_per_round": round(calls["HtoD"] / launched, 2),
        "copies_to_host_per_round": round(calls["DtoH"] / launched, 2),
        "waits_per_round": round(waits / launched, 2),
        "gap_us": round(statistics.median(gaps), 1) if gaps else None,
        "in_graphs": round(busy, 3) if busy == busy else None,
    }  # fmt: skip

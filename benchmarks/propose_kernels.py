"""Kernels of one merged propose on a GPU, by torch's profiler, beside the floors of what they do.

    python benchmarks/propose_kernels.py --platform cuda --shape dflash-qwen3-8b -k 15 --requests 1,8,32 --json FILE

Kernels overlap, so a kernel's time here is how much later the device is done because of it: the times of all add up to
that of the propose. A profiler slows the host down and not the device.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specgraph.attention import choose_attention
from specgraph.device import Platform, open_platform
from specgraph.draft import DraftConfig, Drafter
from specgraph.engine import allocate_caches
from specgraph.tools.floor import DeviceRates, measure_rates, propose_floor, propose_work
from specgraph.tools.propose import BenchCase, propose_batch
from specgraph.tools.shapes import random_head, shape_named

CALLS = 8
"""Proposes in a trace; each kernel's time is the median over them."""


def kernels(platform: Platform, drafter: Drafter, requests: int) -> dict[str, dict[str, Any]]:
    """Calls and microseconds of each kernel in one propose, by name, in the order of their first calls."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(CALLS):
            drafter.propose(drafter.inputs(requests), copy=False)
            platform.synchronize()
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events() or []
        if event.device_type.name != "CPU" and not event.name.startswith(("Mem", "Activity"))
    )
    each = len(ran) // CALLS
    found: dict[str, dict[str, Any]] = {}
    ends = [0.0] * CALLS
    for place in range(each):
        own: list[float] = []
        for call in range(CALLS):
            start, end, _ = ran[call * each + place]
            before = ends[call] if place else start
            own.append(max(0.0, end - before))
            ends[call] = max(before, end)
        row = found.setdefault(
            ran[place][2].replace("(anonymous namespace)::", "").split("<")[0].split("(")[0][:60],
            {"calls": 0, "us": 0.0},
        )
        row["calls"] += 1
        row["us"] += median(own)
    return {name: {**row, "us": round(row["us"], 1)} for name, row in found.items()}


def measure(platform: Platform, shape: str, requests: int, k: int, context: int, rates: DeviceRates) -> dict[str, Any]:
    """One batch size: the floors of a propose, those of its parts, and its kernels."""
    length = context + 2 * (k + 1)
    head = random_head(shape_named(shape), platform.device, torch.bfloat16, length)
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=requests, max_model_len=length, capture_sizes=[requests],
        block_size=attention.preferred_block_size, lowering="merged",
    )  # fmt: skip
    blocks = 1 + requests * -(-length // config.block_size)
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, config, attention=attention)
    drafter.capture()
    case = BenchCase(shape=shape, requests=requests, k=k, context=context)
    drafter.propose(propose_batch(head, case, platform.device, config.block_size))
    work = propose_work(head, requests, k, context)
    floors = {
        "linears": sum(
            max(w.bytes / rates.bytes_per_second, w.flops / rates.flops_per_second) for w in work if w.flops
        ),
        "attention": sum(w.bytes / rates.bytes_per_second for w in work if not w.flops),
    }
    row = {
        "requests": requests, **propose_floor(head, requests, k, context, rates),
        "part_floors_us": {part: round(seconds * 1e6, 1) for part, seconds in floors.items()},
        "kernels": kernels(platform, drafter, requests),
    }  # fmt: skip
    drafter.close()
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--shape", default="dflash-qwen3-8b")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("-k", type=int, default=15)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    platform = open_platform(asked.platform)
    rates = measure_rates(platform, torch.bfloat16)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]), "device": platform.info.device_name,
        "versions": dict(platform.info.versions), "dtype": "bfloat16", "shape": asked.shape, "k": asked.k,
        "context": asked.context, "bandwidth_bytes_per_second": rates.bytes_per_second,
        "matmul_flops_per_second": rates.flops_per_second, "rows": [],
    }  # fmt: skip
    with torch.inference_mode():
        for requests in map(int, asked.requests.split(",")):
            report["rows"].append(measure(platform, asked.shape, requests, asked.k, asked.context, rates))
            print(json.dumps(report["rows"][-1]), flush=True)
            asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

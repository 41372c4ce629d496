"""Times gated linears of 65 to 384 rows: the library's matmul with the kernel that gates after it, and our kernel.

    python benchmarks/many_rows.py --json benchmarks/results/h200-many-rows.json

Each way runs in a graph over copies of the weights, so many that none is in a cache, the ways in turns. With --requests
also whole rounds of a target of Llama-3-8B's shape and an EAGLE-3 head, both with random weights, K = 5.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specgraph import SpeculativeDecoder
from specgraph.benchmarking.floor import measure_rates
from specgraph.benchmarking.rounds import TARGETS, add_prompts, captured_decoder, random_target, rounds_in_turns
from specgraph.benchmarking.shapes import SHAPES, random_head
from specgraph.benchmarking.timing import device_time
from specgraph.benchmarking.tune import triton_ops
from specgraph.options import LoweringChoice
from specgraph.platforms import Platform, open_platform

COPIED_BYTES = 600 << 20
TURNS = 5
K, CONTEXT, CAPTURES, ROUNDS, LEAD = 5, 1024, 2, 8, 2
LENGTH = CONTEXT + (20 + TURNS * (ROUNDS + LEAD)) * (K + 1)


def graph_of(platform: Platform, call: Callable[[int], Any], copies: int) -> Any:
    """A graph of one call per copy of the weights."""
    call(0)
    graph = platform.graph()
    with graph.capture():
        for i in range(copies):
            call(i)
    return graph


def measure(platform: Platform, rows: int, columns: int, depth: int, rates: Any) -> dict[str, Any]:
    """Microseconds per call of the library and of ours, the floor, and the error of each against float64."""
    copies = max(3, -(-COPIED_BYTES // (columns * depth * 4)))
    weights = [
        (torch.randn(2 * columns, depth, device=platform.device) * depth**-0.5).bfloat16() for _ in range(copies)
    ]
    x = torch.randn(rows, depth, device=platform.device).bfloat16()
    ops = triton_ops(platform)
    ways = {"library": type(ops)(replace(ops.options, gated_of_many_rows=None)), "ours": ops}

    def call(way: Any, i: int) -> Tensor:
        return way.norm_gate_up(x, None, 0.0, weights[i])

    gate, up = (x.double() @ weights[0].double().T).chunk(2, 1)
    wide = torch.nn.functional.silu(gate) * up
    errors = {name: float((call(way, 0).double() - wide).norm() / wide.norm()) for name, way in ways.items()}
    graphs = {name: graph_of(platform, partial(call, way), copies) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for way, graph in graphs.items():
            times[way].append(median(device_time(platform, graph.replay, repeats=5, warmup=1)) / copies)
    for graph in graphs.values():
        graph.close()
    bytes_, flops = columns * depth * 4, 4 * rows * columns * depth
    floor = max(bytes_ / rates.bytes_per_second, flops / rates.flops_per_second)
    return {
        "rows": rows, "columns": columns, "depth": depth, "floor_us": round(floor * 1e6, 1),
        **{f"{way}_us": round(median(seen), 1) for way, seen in times.items()},
        **{f"{way}_error": error for way, error in errors.items()},
    }  # fmt: skip


def rounds(platform: Platform, requests: int, lowering: LoweringChoice) -> dict[str, Any]:
    """Milliseconds of a round of each way, the median of each capture. The captures take turns."""
    target = random_target(TARGETS["llama3-8b"], platform.device, torch.bfloat16, LENGTH)
    head = random_head(SHAPES["eagle3-llama3-8b"], platform.device, torch.bfloat16, LENGTH)
    ops = triton_ops(platform)
    shipped = ops.options
    ways = {"library": replace(shipped, gated_of_many_rows=None), "ours": shipped}
    g = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(0, target.vocab_size, (requests, CONTEXT), generator=g).tolist()
    decoders: list[SpeculativeDecoder] = []
    for options in [*ways.values()] * CAPTURES:
        object.__setattr__(ops, "options", options)
        decoders.append(
            captured_decoder(
                platform, target, head, num_speculative_tokens=K, max_num_requests=requests, max_model_len=LENGTH,
                synthetic_acceptance=0.7, lowering=lowering,
            )
        )  # fmt: skip
        object.__setattr__(ops, "options", shipped)
        add_prompts(decoders[-1], prompts)
        for _ in range(3):
            decoders[-1].step()
    times = rounds_in_turns(decoders, turns=TURNS, rounds=ROUNDS, lead=LEAD)
    found: dict[str, list[float]] = {}
    for way, decoder, seconds in zip([*ways] * CAPTURES, decoders, times, strict=True):
        found.setdefault(way, []).append(round(median(seconds) * 1e3, 3))
        decoder.close()
    return {"requests": requests, "lowering": lowering, "rows": requests * (K + 1), "round_ms": found}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--columns", type=int, default=14336, help="of the output")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--rows", default="96,128,192,256,384")
    parser.add_argument("--requests", default="", help="batch sizes of whole rounds, comma-separated")
    parser.add_argument("--lowering", default="merged")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    if triton_ops(platform).options.gated_of_many_rows is None:
        parser.error("our kernel is not there to be timed: it needs Hopper and cuda-bindings")
    rates = measure_rates(platform, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    with torch.inference_mode():
        for count in map(int, a.rows.split(",")):
            rows.append(measure(platform, count, a.columns, a.depth, rates))
            print(json.dumps(rows[-1]), flush=True)
        for requests in map(int, filter(None, a.requests.split(","))):
            timed.append(rounds(platform, requests, a.lowering))
            print(json.dumps(timed[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "dtype": "bfloat16",
        "command": "python benchmarks/many_rows.py " + " ".join(sys.argv[1:]), "rows": rows,
        "rounds": timed,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

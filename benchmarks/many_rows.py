"""Times linears of 65 to 384 rows: the library's matmul with the kernel that adds or gates after it, and our kernel.

    python benchmarks/many_rows.py --json benchmarks/results/h200-many-rows.json

Each way runs in a graph over copies of the weights, so many that none is in a cache, the ways in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specgraph.benchmarking.floor import measure_rates
from specgraph.benchmarking.timing import device_time
from specgraph.benchmarking.tune import triton_ops
from specgraph.platforms import Platform, open_platform

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336), "pair": (6144, 8192)}
"""Output columns and input columns, of a target of 8B parameters and of its EAGLE-3 head."""
COPIED_BYTES = 600 << 20
TURNS = 5


def graph_of(platform: Platform, call: Callable[[int], Any], copies: int) -> Any:
    """A graph of one call per copy of the weights."""
    call(0)
    graph = platform.graph()
    with graph.capture():
        for i in range(copies):
            call(i)
    return graph


def measure(platform: Platform, name: str, rows: int, rates: Any) -> dict[str, Any]:
    """Microseconds per call of the library and of ours, the floor, and the error of each against float64."""
    from specgraph_cuda.many_rows_plan import plan_for

    columns, depth = SHAPES[name]
    gated, added = name == "gate_up", name in ("o", "down")
    outputs, device = columns * (2 if gated else 1), platform.device
    copies = max(3, -(-COPIED_BYTES // (outputs * depth * 2)))
    weights = [(torch.randn(outputs, depth, device=device) * depth**-0.5).bfloat16() for _ in range(copies)]
    x, residual = (torch.randn(rows, size, device=device).bfloat16() for size in (depth, columns))
    ops = triton_ops(platform)
    ways = {"library": type(ops)(replace(ops.options, many_rows=None)), "ours": ops}
    plan = plan_for(rows, columns, depth, gated)

    def call(way: Any, i: int) -> Tensor:
        if gated:
            return way.norm_gate_up(x, None, 0.0, weights[i], None)
        return way.norm_linear(x, None, 0.0, weights[i], None, residual if added else None)

    wide = x.double() @ weights[0].double().T
    if gated:
        gate, up = wide.chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * up
    wide = wide + residual.double() if added else wide
    errors = {name: float((call(way, 0).double() - wide).norm() / wide.norm()) for name, way in ways.items()}
    graphs = {name: graph_of(platform, partial(call, way), copies) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for way, graph in graphs.items():
            times[way].append(median(device_time(platform, graph.replay, repeats=5, warmup=1)) / copies)
    for graph in graphs.values():
        graph.close()
    floor = max(outputs * depth * 2 / rates.bytes_per_second, 2 * rows * outputs * depth / rates.flops_per_second)
    return {
        "linear": name, "rows": rows, "floor_us": round(floor * 1e6, 1),
        "plan": None if plan is None else astuple(plan),
        **{f"{way}_us": round(median(seen), 1) for way, seen in times.items()},
        **{f"{way}_error": error for way, error in errors.items()},
    }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--linears", default="gate_up,o")
    parser.add_argument("--rows", default="96,128,192,256,384")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    rates = measure_rates(platform, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in a.linears.split(","):
            for count in map(int, a.rows.split(",")):
                rows.append(measure(platform, name, count, rates))
                print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "dtype": "bfloat16",
        "command": "python benchmarks/many_rows.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

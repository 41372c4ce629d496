"""Times linears of 33 to 384 rows: the library's matmuls with what follows them, and our kernel.

    python benchmarks/many_rows.py --proposes eagle3-llama3-8b:96 --requests 32 --json benchmarks/results/FILE

Each linear alone runs in a graph over copies of its weights, so many that none is in a cache. Proposes, and rounds of a
target of Llama-3-8B's shape with an EAGLE-3 head (random weights, K = 5), run with our kernel for the linears that each
way names. Ways take turns, two captures of each. Rounds come in stretches of half a second, with the energy that they
took by the GPU's own counter, because at its power limit they can take no less time than that.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from specgraph_cuda.many_rows import linears
from specgraph_cuda.many_rows_plan import Kind, Plan, plan_for

from specgraph.device import Platform, open_platform
from specgraph.tools.floor import measure_rates
from specgraph.tools.propose import BenchCase, bench_propose
from specgraph.tools.rounds import (
    TARGETS,
    add_prompts,
    captured_decoder,
    random_target,
    seconds_per_round,
)
from specgraph.tools.shapes import SHAPES, random_head
from specgraph.tools.timing import device_time
from specgraph.tools.tune import triton_ops

LINEARS: dict[str, tuple[tuple[int, int], ...]] = {
    "gate_up": ((14336, 4096), (12288, 4096)),
    "down": ((4096, 14336), (4096, 12288)),
    "lm_head": ((32000, 4096), (151936, 4096)),
    "o_proj": ((4096, 4096),),
    "qkv": ((6144, 4096),),
    "fc": ((6144, 8192),),
}
"""Output and input columns by name."""
WAYS = ("", "gate_up", "gate_up down")
COPIED_BYTES = 600 << 20
CAPTURES, CONTEXT, SECONDS = 2, 1024, 0.5


@contextmanager
def computed_by_ours(platform: Platform, way: str) -> Iterator[None]:
    """Within it, our kernel computes the linears named in `way`, or `all`; other kernels and the library the others."""
    shapes = [shape for name in way.split() if name != "all" for shape in LINEARS[name]]

    def choose(kind: Kind, rows: int, columns: int, depth: int) -> Plan | None:
        return plan_for(kind, rows, columns, depth) if way == "all" or (columns, depth) in shapes else None

    ops = triton_ops(platform)
    shipped = ops.options
    object.__setattr__(ops, "options", replace(shipped, many_rows=linears(choose)))
    try:
        yield
    finally:
        object.__setattr__(ops, "options", shipped)


def alone(platform: Platform, name: str, columns: int, depth: int, rows: int, rates: Any) -> dict[str, Any]:
    """Microseconds per call of the library and of ours, the floor, and the error of each against float64."""
    packed = columns * (2 if name == "gate_up" else 1)
    copies = max(3, -(-COPIED_BYTES // (packed * depth * 2)))
    weights = [(torch.randn(packed, depth, device=platform.device) * depth**-0.5).bfloat16() for _ in range(copies)]
    x, residual = (torch.randn(rows, size, device=platform.device).bfloat16() for size in (depth, columns))
    ops = triton_ops(platform)

    def call(i: int) -> Any:
        if name == "gate_up":
            return ops.norm_gate_up(x, None, 0.0, weights[i])
        return ops.norm_linear(x, None, 0.0, weights[i], None, residual)

    wide = x.double() @ weights[0].double().T
    if name == "gate_up":
        gate, up = wide.chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * up
    else:
        wide += residual.double()
    row: dict[str, Any] = {"linear": name, "rows": rows, "columns": columns, "depth": depth}
    bytes_, flops = packed * depth * 2, 2 * rows * packed * depth
    row["floor_us"] = round(max(bytes_ / rates.bytes_per_second, flops / rates.flops_per_second) * 1e6, 1)
    graphs: dict[str, Any] = {}
    for way, ours in (("library", ""), ("ours", name)):
        with computed_by_ours(platform, ours):
            got = call(0)
            row[f"{way}_error"] = float((got.double() - wide).norm() / wide.norm())
            graphs[way] = platform.graph()
            with graphs[way].capture():
                for i in range(copies):
                    call(i)
    times: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(5):
        for way, graph in graphs.items():
            times[way].append(median(device_time(platform, graph.replay, repeats=5, warmup=1)) / copies)
    for way, graph in graphs.items():
        row[f"{way}_us"] = round(median(times[way]), 1)
        graph.close()
    return row


def proposes(platform: Platform, shape: str, requests: int, ways: Sequence[str]) -> dict[str, Any]:
    """Microseconds of a merged propose of each way, the median of each capture, and the floors."""
    case = BenchCase(
        shape=shape, requests=requests, k=15 if shape.startswith("dflash") else 5, context=CONTEXT,
        lowerings=("merged",), torch_ops=False, repeats=20, count_kernels=False,
    )  # fmt: skip
    rates = measure_rates(platform, torch.bfloat16)
    row: dict[str, Any] = {"shape": shape, "requests": requests, "propose_us": {}}
    for _ in range(CAPTURES):
        for way in ways:
            with computed_by_ours(platform, way):
                found = bench_propose(platform, case, dtype=torch.bfloat16, rates=rates)[0]
            row["propose_us"].setdefault(way, []).append(found["device_us"])
            row |= {key: found[key] for key in ("floor_us", "kernel_floor_us")}
    return row


def energy_counter() -> Callable[[], float]:
    """A function that returns the joules that the current GPU has taken since its driver was loaded (NVML)."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)):
        raise SystemExit("many_rows.py: NVML does not know this GPU")

    def joules() -> float:
        nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used))
        return used.value / 1e3

    return joules


def rounds(platform: Platform, requests: int, ways: Sequence[str], turns: int) -> dict[str, Any]:
    """Milliseconds and joules of a round in each stretch, by way. Hardly any draft token is accepted."""
    per_stretch = round(SECONDS / (0.009 if requests <= 32 else 0.0145))
    length = CONTEXT + 2 * (20 + (turns + 1) * per_stretch)
    target = random_target(TARGETS["llama3-8b"], platform.device, torch.bfloat16, length)
    head = random_head(SHAPES["eagle3-llama3-8b"], platform.device, torch.bfloat16, length)
    g = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(0, target.vocab_size, (requests, CONTEXT), generator=g).tolist()
    made: list[tuple[str, Any]] = []
    for way in [*ways] * CAPTURES:
        with computed_by_ours(platform, way):
            decoder = captured_decoder(
                platform, target, head, num_speculative_tokens=5, max_num_requests=requests, max_model_len=length,
                synthetic_acceptance=0.05, lowering="merged",
            )  # fmt: skip
        add_prompts(decoder, prompts)
        seconds_per_round(decoder, 3)
        made.append((way, decoder))
    joules, order = energy_counter(), Random(0)
    row: dict[str, Any] = {"requests": requests, "rows": 6 * requests, "rounds": per_stretch, "round_ms": {}}
    row["joules"] = {}
    seconds_per_round(made[0][1], per_stretch // 2)  # the GPU is at its power limit from here on
    for _ in range(turns):
        for way, decoder in order.sample(made, len(made)):
            before = joules()
            row["round_ms"].setdefault(way, []).append(round(seconds_per_round(decoder, per_stretch) * 1e3, 3))
            row["joules"].setdefault(way, []).append(round((joules() - before) / per_stretch, 3))
    for _, decoder in made:
        decoder.close()
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="96,128,192", help="of linears alone")
    parser.add_argument("--proposes", default="", help="shape:requests, comma-separated")
    parser.add_argument("--requests", default="", help="batch sizes of whole rounds, comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="linears that ours computes, ways comma-separated")
    parser.add_argument("--turns", type=int, default=5, help="stretches of rounds per capture")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    platform, ways = open_platform("cuda"), asked.ways.split(",")
    if triton_ops(platform).options.many_rows is None:
        parser.error("our kernel is not there to be timed: it needs Hopper and cuda-bindings")
    rates = measure_rates(platform, torch.bfloat16)
    report: dict[str, Any] = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "dtype": "bfloat16",
        "command": " ".join(["python", *sys.argv]), "alone": [], "proposes": [], "rounds": [],
    }  # fmt: skip
    calls: list[tuple[str, Callable[[], Any]]] = []
    for rows in map(int, filter(None, asked.rows.split(","))):
        for name, shapes in LINEARS.items():
            for columns, depth in shapes:
                kind: Kind = "GATED" if name == "gate_up" else "PARTS"
                if plan_for(kind, rows, columns, depth) is not None:
                    calls.append(("alone", partial(alone, platform, name, columns, depth, rows, rates)))
    for shape, requests in (each.split(":") for each in filter(None, asked.proposes.split(","))):
        calls.append(("proposes", partial(proposes, platform, shape, int(requests), ways)))
    for requests in map(int, filter(None, asked.requests.split(","))):
        calls.append(("rounds", partial(rounds, platform, requests, ways, asked.turns)))
    for name, call in calls:
        with torch.inference_mode():
            report[name].append(call())
        torch.cuda.empty_cache()
        print(json.dumps(report[name][-1]), flush=True)
        asked.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Each op of a propose alone, beside its floor, a kernel that only reads the same bytes, and the library's product.

    python benchmarks/kernels.py --shape eagle3-llama3-8b --requests 1,8,32 -k 5 --json FILE

The ops of one eager propose are recorded with their tensors. Each distinct one is captured eight times in one graph,
with other data read into the last-level cache before each call, and the time of the graph without those calls is taken
off. Microseconds, medians; all graphs and the merged propose take turns. Needs an NVIDIA GPU and Triton.

Per op: `reads_us` and `products_us` at the device's best rates, `read_us`, `library_us` (torch's product of the same
rows and weights), `alone_us`, and how many of them a propose has. Per propose their sums; `library_us` there has the
library's products, reads of the KV for attention, and our own op where neither stands for it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.attention import choose_attention
from specgraph.cli.env import environment
from specgraph.device import Graph, Platform, open_platform
from specgraph.dispatch_mode import DispatchMode
from specgraph.draft import Drafter
from specgraph.engine.blocks import bytes_per_token
from specgraph.options import LoweringChoice
from specgraph.tools.floor import DeviceRates, measure_rates, propose_floor
from specgraph.tools.propose import BenchCase, drafter_for, propose_batch
from specgraph.tools.shapes import RandomHead, random_head, shape_named
from specgraph.tools.timing import device_time, in_turns

CALLS, REPEATS = 8, 40


@dataclass(slots=True)
class Call:
    """A distinct op of a propose."""

    run: Callable[[], Any]
    weights: list[Tensor]
    kv_bytes: int
    rows: int
    count: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that it must read."""
        return self.kv_bytes + sum(weight.nbytes for weight in self.weights)


class Recorder(DispatchMode):
    """Keeps each distinct op of one propose, with its tensors."""

    def __init__(self, head: RandomHead, requests: int, context: int) -> None:
        super().__init__()
        matrices = [w for name, w in head.weights().items() if w.dim() == 2 and "embed" not in name]
        self._weights = {matrix.data_ptr(): matrix for matrix in matrices if matrix.dtype == head.dtype}
        self._kv = requests * context * bytes_per_token(head.attention_layers[:1], head.dtype)
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "specgraph" or func._opname in ("mm", "addmm", "bmm", "baddbmm", "copy_"):
            shapes = [str(tuple(a.shape)) if isinstance(a, Tensor) else str(a) for a in (*args, *kwargs.values())]
            weights = [
                self._weights[a.data_ptr()] for a in args if isinstance(a, Tensor) and a.data_ptr() in self._weights
            ]
            kv = self._kv if "attention" in func._opname else 0
            named = f"{func._opname} {' '.join(shapes[:4])}"
            # Counts and positions as they are now: later steps, and each of these calls, move them on
            kept = [a.clone() if isinstance(a, Tensor) and not a.is_floating_point() else a for a in args]
            call = Call(lambda: func(*kept, **kwargs), weights, kv, args[0].shape[0])
            self.calls.setdefault(named, call).count += 1
        return func(*args, **kwargs)


@triton.jit
def read_kernel(source, out, size, BLOCK: tl.constexpr):
    """Each program reads its share of `size` elements and stores the largest."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32))
    tl.store(out + tl.program_id(0), tl.max(best))


class Cold:
    """Captures calls that find other data in the last-level cache."""

    def __init__(self, platform: Platform) -> None:
        self.platform, self.pool = platform, platform.graph_pool()
        self.other = torch.zeros(1 << 27, dtype=torch.bfloat16, device=platform.device)
        self.out = torch.empty(1 << 12, device=platform.device)

    def read(self, source: Tensor) -> None:
        """Read a tensor and do nothing else."""
        read_kernel[(264,)](source, self.out, source.numel(), BLOCK=8192, num_warps=8)  # pyright: ignore

    def graph(self, call: Callable[[], Any]) -> Graph:
        """Return a graph of several calls, each after a read of other data."""
        graph = self.platform.graph(self.pool)
        with self.platform.use(self.platform.capture_stream):
            call()
        self.platform.synchronize()
        with graph.capture():
            for _ in range(CALLS):
                self.read(self.other)
                call()
        return graph


def prepared(
    platform: Platform, case: BenchCase, head: RandomHead, lowering: LoweringChoice
) -> tuple[Drafter, Callable[[], Any]]:
    """Return a captured drafter and its propose, over a batch in its buffers."""
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    drafter = drafter_for(case, lowering, platform, head, attention)
    drafter.capture()
    drafter.propose(propose_batch(head, case, platform.device, attention.preferred_block_size))
    return drafter, lambda: drafter.propose(drafter.inputs(case.requests), copy=False)


def measure(platform: Platform, case: BenchCase, rates: DeviceRates, cold: Cold) -> dict[str, Any]:
    """Return the times of one size."""
    dtype = torch.bfloat16
    head = random_head(shape_named(case.shape), platform.device, dtype, case.max_model_len)
    eager, run_eager = prepared(platform, case, head, "eager")
    merged, run_merged = prepared(platform, case, head, "merged")
    with Recorder(head, case.requests, case.context) as recorded:
        run_eager()

    def no_call() -> None: ...

    graphs = {("", "", ""): cold.graph(no_call)}
    for name, call in recorded.calls.items():
        graphs[name, "alone", ""] = cold.graph(call.run)
        for at, weight in enumerate(call.weights):
            graphs[name, "read", str(at)] = cold.graph(lambda weight=weight: cold.read(weight))
            x = torch.randn(call.rows, weight.shape[1], device=weight.device).to(dtype)
            graphs[name, "library", str(at)] = cold.graph(lambda x=x, weight=weight: x @ weight.T)
        if call.kv_bytes:
            source = torch.randn(call.kv_bytes // 2, device=platform.device).to(dtype)
            graphs[name, "read", "kv"] = cold.graph(lambda source=source: cold.read(source))
    times: dict[Any, list[float]] = {key: [] for key in [*graphs, "merged"]}
    for key in in_turns(list(times), REPEATS):
        run = run_merged if key == "merged" else graphs[key].replay
        times[key] += device_time(platform, run, repeats=1, warmup=1)
    base = statistics.median(times["", "", ""])
    rows: list[dict[str, Any]] = []
    for name, call in recorded.calls.items():
        row: dict[str, Any] = {
            "op": name,
            "count": call.count,
            "rows": call.rows,
            "megabytes": round(call.bytes / 1e6, 1),
        }
        flops = sum(2 * call.rows * weight.numel() for weight in call.weights)
        row["reads_us"] = round(call.bytes / rates.bytes_per_second * 1e6, 1)
        row["products_us"] = round(flops / rates.flops_per_second * 1e6, 1)
        for way in ("read", "library", "alone"):
            found = [statistics.median(times[key]) - base for key in graphs if key[:2] == (name, way)]
            if found:
                row[f"{way}_us"] = round(sum(found) / CALLS, 1)
        rows.append(row)
    for drafter in (eager, merged):
        drafter.close()
    for graph in graphs.values():
        graph.close()
    sums = {way: sum(row["count"] * row.get(way, 0) for row in rows) for way in ("read_us", "alone_us")}
    stand_ins = (row.get("library_us") or row.get("read_us") or row["alone_us"] for row in rows)
    sums["library_us"] = sum(row["count"] * time for row, time in zip(rows, stand_ins, strict=True))
    floor = propose_floor(head, case.requests, case.k, case.context, rates)
    sums["merged_us"] = statistics.median(times["merged"])
    summary: dict[str, Any] = {"shape": case.shape, "requests": case.requests, "k": case.k, "context": case.context}
    summary |= {name: round(time, 1) for name, time in sums.items()} | floor
    return summary | {"ratio": round(sums["merged_us"] / floor["kernel_floor_us"], 3), "kernels": rows}


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json")
    options = parser.parse_args()
    platform = open_platform("cuda")
    rates, results = measure_rates(platform, torch.bfloat16), []
    with torch.inference_mode():
        cold = Cold(platform)
        for requests in map(int, options.requests.split(",")):
            case = BenchCase(shape=options.shape, requests=requests, k=options.k, context=options.context)
            results.append(result := measure(platform, case, rates, cold))
            print({name: value for name, value in result.items() if name != "kernels"})
            for row in result["kernels"]:
                print("  ", row, flush=True)
    report = environment(platform) | {
        "command": shlex.join(["python", *sys.argv]),
        "bandwidth_bytes_per_second": rates.bytes_per_second, "matmul_flops_per_second": rates.flops_per_second,
        "rows": results,
    }  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()

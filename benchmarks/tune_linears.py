"""Time every sensible tile for the linears of a draft step, and print the best ones.

    python benchmarks/tune_linears.py --out tiles.json

Each candidate runs in a graph over enough copies of the weights that none is still in a cache, each launch overlapped
with the one before as in a captured draft step. Figures are microseconds per launch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from dataclasses import asdict, replace

import torch
from specgraph_cuda.kernels import overlap_previous

from specgraph.kernels.triton.implement import TritonOps
from specgraph.kernels.triton.launch import LaunchOptions, Tile

# kind -> (output columns, input columns) of an EAGLE-3 head for an 8B Llama target
SHAPES = {
    "linear-pair": (6144, 8192),
    "linear": (4096, 4096),
    "linear-deep": (4096, 14336),
    "linear-aux": (4096, 12288),
    "gate_up": (14336, 4096),
    "head": (32000, 4096),
}
SHARED_MEMORY = 220 * 1024


def candidates(kind: str, rows: int) -> list[Tile]:
    """Tiles whose pipeline fits shared memory and keeps enough bytes in flight."""
    found: list[Tile] = []
    width = 2 if kind == "gate_up" else 1
    for columns, depth, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 5, 6)
    ):
        weights = columns * width * depth * 2
        shared = (weights + rows * depth * 2) * stages
        in_flight = weights * (stages - 1)
        if shared > SHARED_MEMORY or weights < 8192 or weights > 65536 or not 24 * 1024 <= in_flight <= 160 * 1024:
            continue
        if columns * width < 4 * warps or columns * width > 64 * warps or rows * depth > 64 * 256:
            continue
        if SHAPES[kind][0] // columns < 100:
            continue
        found.append(Tile(columns, depth, warps, stages, 512))
    return found


def make_call(kind: str, rows: int, copies: int):
    """A function (ops, copy) that runs one linear of this kind."""
    columns, depth = SHAPES[kind]
    device, dtype = "cuda", torch.bfloat16
    torch.manual_seed(0)
    out_rows = 2 * columns if kind == "gate_up" else columns
    weights = [torch.randn(out_rows, depth, device=device, dtype=dtype) * depth**-0.5 for _ in range(copies)]
    x = torch.randn(rows, depth, device=device, dtype=dtype)
    if kind == "gate_up":
        return lambda ops, i: ops.norm_gate_up(x, None, 1e-5, weights[i], None)
    if kind == "head":
        step = torch.zeros(1, dtype=torch.int64, device=device)
        token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        result = torch.zeros(rows, 8, dtype=torch.int64, device=device)
        return lambda ops, i: ops.greedy_head(x, None, 1e-5, weights[i], None, step, token_ids, result)
    if kind in ("linear-aux", "linear-pair"):
        return lambda ops, i: ops.norm_linear(x, None, 1e-5, weights[i], None, None)
    residual = torch.randn(rows, columns, device=device, dtype=dtype)
    return lambda ops, i: ops.norm_linear(x, None, 1e-5, weights[i], None, residual)


def with_tile(tile: Tile | None, overlap: bool) -> TritonOps:
    """Ops whose every linear uses this tile; None for the library's matmul."""
    extra = {"launch_pdl": True} if overlap else {}
    return TritonOps(
        LaunchOptions(
            overlap=overlap_previous if overlap else None, extra=extra, tile=lambda *shape: tile, compute_units=132
        )
    )


def compile_some(work: list[tuple[str, int, Tile]], overlap: bool) -> None:
    """Fill the compiler's cache; a candidate that does not compile or launch is found again when it is timed."""
    calls = {}
    for kind, rows, tile in work:
        try:
            if (kind, rows) not in calls:
                calls[kind, rows] = make_call(kind, rows, 1)
            calls[kind, rows](with_tile(tile, overlap), 0)
        except Exception:
            continue


def time_call(call, ops: TritonOps, copies: int, rounds: int) -> float:
    """Microseconds per launch: median over replays of a graph of `copies` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(ops, 0)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for i in range(copies):
            call(ops, i)
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / copies)
    return statistics.median(times)


def bandwidth() -> dict[str, float]:
    """TB/s of a large device-to-device copy (bytes read plus written) and of a large read."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    found = {}
    for name, run, moved in (
        ("copy", lambda: b.copy_(a), 2 * a.numel()),
        ("read", lambda: a.view(torch.float32).amax(), a.numel()),
    ):
        times = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        found[name] = moved / min(times) / 1e9
    return found


def main() -> None:
    """Sweep, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--kinds", nargs="*", default=list(SHAPES))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--no-overlap", action="store_true")
    arguments = parser.parse_args()
    overlap = not arguments.no_overlap
    work = [
        (kind, rows, tile) for kind in arguments.kinds for rows in arguments.rows for tile in candidates(kind, rows)
    ]
    print(len(work), "candidates", flush=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.workers) as pool:
        pool.starmap(compile_some, [(work[i :: arguments.workers], overlap) for i in range(arguments.workers)])
    print("compiled; bandwidth TB/s:", bandwidth(), flush=True)
    results = []
    for kind in arguments.kinds:
        columns, depth = SHAPES[kind]
        size = columns * depth * 2 * (2 if kind == "gate_up" else 1)
        copies = max(3, -(-(600 << 20) // size))
        for rows in arguments.rows:
            call = make_call(kind, rows, copies)
            timed = []
            for tile in [None, *candidates(kind, rows)]:
                try:
                    timed.append((time_call(call, with_tile(tile, overlap), copies, 7), tile))
                except Exception as error:
                    if tile is None or "out of resource" not in str(error):
                        print(kind, rows, tile, type(error).__name__, str(error)[:100])
            best = sorted((entry for entry in timed if entry[1] is not None), key=lambda entry: entry[0])[:4]
            for _, tile in best:
                for prefetch in (64, 256, 1024, 2048):
                    other = replace(tile, prefetch=prefetch)
                    timed.append((time_call(call, with_tile(other, overlap), copies, 7), other))
            library = next(t for t, tile in timed if tile is None)
            timed = sorted(((t, tile) for t, tile in timed if tile is not None), key=lambda pair: pair[0])
            print(f"{kind} {rows} rows: floor {size / 4.39e6:.1f}, library {library:.1f}, tried {len(timed)}")
            for t, tile in timed[:6]:
                print(f"    {t:.1f}  {tile}", flush=True)
            results.append(
                {
                    "kind": kind, "rows": rows, "library_us": library, "bytes": size,
                    "tiles": [{"us": t, **asdict(tile)} for t, tile in timed],
                }
            )  # fmt: skip
            del call
            torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

"""Times attention with the tiles of the `cuda` backend and with others: alone, in proposes and in rounds.

    python benchmarks/attention_tiles.py --json FILE

Attention has 32 heads of 128 over 8 KV heads, bfloat16, blocks of 16. `before` are the tiles that shipped until
2026-11-22. Alone: microseconds per call (with the kernel that adds the splits) in a graph over as many layers' caches
as keep them out of the L2, all tiles in turns. Contexts are 1024 ("even"), 1024 in block tables for 4096 ("wide"),
1024 in caches in e4m3 ("fp8"), 200 to 4000 ("uneven") or 32768 ("long"). Rounds: lowering `round`, K = 5, two captures
with each tiles in turns; `prompts_us` is the round that takes in all prompts. Proposes: lowering `merged`, before and
now in turns, two captures of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median
from typing import Any

import specgraph_cuda.kernels as device_kernels
import torch
from attention_problem import Problem, contexts_of

from specgraph import SpeculativeDecoder, open_platform
from specgraph.benchmarking.floor import measure_rates
from specgraph.benchmarking.propose import BenchCase, bench_propose
from specgraph.benchmarking.rounds import (
    TARGETS,
    add_prompts,
    captured_decoder,
    random_target,
    rounds_in_turns,
    seconds_per_round,
)
from specgraph.benchmarking.shapes import SHAPES, random_head
from specgraph.benchmarking.timing import device_time
from specgraph.benchmarking.tune import triton_ops
from specgraph.kernels.triton.launch import (
    AttentionShape,
    AttentionTile,
    ChooseAttention,
    attention_splits,
    default_attention,
)
from specgraph.platforms import Platform

CASES = [
    *[("verify", n, "even") for n in (1, 8, 16, 32, 64)], *[("verify", n, "uneven") for n in (8, 32, 64)],
    *[("verify", n, "wide") for n in (8, 32, 64)], ("verify", 1, "long"),
    *[("draft", n, "even") for n in (1, 8, 32, 64)],
    ("draft", 1, "long"), ("draft", 32, "uneven"), *[("block", n, "even") for n in (1, 8, 32)], ("tree", 8, "even"),
    ("prompt", 1, "even"), ("prompt", 1, "long"), *[("draft", n, "fp8") for n in (8, 32, 64)], ("verify", 32, "fp8"),
]  # fmt: skip
"""Kind of attention, requests, contexts."""
PROPOSES = ",".join(f"eagle3-llama3-8b:{n}" for n in (1, 8, 32)) + ",dflash-qwen3-8b:8,dflash-qwen3-8b:32"


def before(shape: AttentionShape) -> AttentionTile:
    """The tiles that shipped until 2026-11-22."""
    if not 16 < shape.rows <= 32 or shape.itemsize != 2 or shape.head_dim > 128:
        return default_attention(shape)
    return AttentionTile(rows=32, keys=128, splits=attention_splits(shape, 32, 128, per_unit=2), stages=3)


def others(shape: AttentionShape) -> list[AttentionTile]:
    """More tiles to time: the backend's own with other keys, splits, stages and spans."""
    tile = device_kernels.attention_for(shape)
    found = [replace(tile, stages=stages) for stages in (3, 5, 7)]
    found += [replace(tile, keys=192 - tile.keys, stages=stages) for stages in (3, 5) if tile.keys in (64, 128)]
    found += [
        replace(tile, splits=splits) for splits in (tile.splits * 2, tile.splits // 2) if splits and tile.span == 0
    ]
    found += [replace(tile, span=span) for span in (512, 1024) if tile.span]
    return found if shape.rows <= 64 else [*found, replace(tile, rows=128, warps=8)]


def tiles_of(shape: AttentionShape) -> list[AttentionTile]:
    """Tiles to time, each once."""
    return list(dict.fromkeys([before(shape), device_kernels.attention_for(shape), *others(shape)]))


def with_tile(ops: Any, tile: AttentionTile) -> Any:
    """These Triton ops, with this tile for every attention."""

    def always(shape: AttentionShape) -> AttentionTile:
        return tile

    return type(ops)(replace(ops.options, attention=always))


def compile_all(name: str) -> None:
    """Fill Triton's cache from several processes."""
    count = min(12, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.starmap(_compile, [(name, i, count) for i in range(count)])


def _compile(name: str, part: int, count: int) -> None:
    platform = open_platform(name)
    ops, index = triton_ops(platform), 0
    for case in CASES:
        problem = Problem(*case, platform.device, layers=1)
        for tile in tiles_of(problem.shape(ops.options.compute_units)):
            index += 1
            if index % count == part:
                with contextlib.suppress(Exception):  # it is found again when it is timed
                    problem.call(with_tile(ops, tile), 0)


def time_alone(platform: Platform, problem: Problem) -> dict[str, Any]:
    """Microseconds of each tile, fastest first, and the error of each against those before."""
    ops = triton_ops(platform)
    shape = problem.shape(ops.options.compute_units)
    graphs: dict[AttentionTile, Any] = {}
    errors: dict[AttentionTile, float] = {}

    want = problem.call(with_tile(ops, before(shape)), 0).double()
    for tile in tiles_of(shape):
        mine = with_tile(ops, tile)
        try:
            got = problem.call(mine, 0).double()
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            continue
        errors[tile] = float((got - want).norm() / want.norm())
        graphs[tile] = platform.graph()
        with graphs[tile].capture():
            for layer in range(problem.layers):
                problem.call(mine, layer)
    times: dict[AttentionTile, list[float]] = {tile: [] for tile in graphs}
    for turn in range(4):
        for tile in random.Random(turn).sample(list(graphs), len(graphs)):
            times[tile] += device_time(platform, graphs[tile].replay, repeats=5, warmup=1)
    for graph in graphs.values():
        graph.close()
    us = {tile: round(median(each) / problem.layers, 2) for tile, each in times.items()}
    rows = sorted([us[tile], list(astuple(tile)), round(errors[tile], 5)] for tile in us)
    return {"before_us": us[before(shape)], "now_us": us[device_kernels.attention_for(shape)], "tiles": rows}


def time_proposes(
    platform: Platform, use: Callable[[ChooseAttention], None], cases: list[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Microseconds of whole proposes, each capture's median."""
    now = device_kernels.attention_for
    for shape, requests in cases:
        case = BenchCase(
            shape=shape, requests=requests, k=15 if "dflash" in shape else 5, context=1024, lowerings=("merged",),
            repeats=25,
        )  # fmt: skip
        row: dict[str, Any] = {"shape": shape, "requests": requests, "k": case.k, "before_us": [], "now_us": []}
        for name, rule in (("before_us", before), ("now_us", now)) * 2:
            use(rule)
            row[name].append(bench_propose(platform, case, dtype=torch.bfloat16)[0]["device_us"])
        use(now)
        yield row


def time_rounds(
    platform: Platform, use: Callable[[ChooseAttention], None], cases: list[tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    """Microseconds of whole rounds with the tiles before and now: medians over stretches of four rounds in turns."""
    longest = 4400
    target = random_target(TARGETS["llama3-8b"], platform.device, torch.bfloat16, longest)
    head = random_head(SHAPES["eagle3-llama3-8b"], platform.device, torch.bfloat16, longest)
    now = device_kernels.attention_for
    ways = (("before", before), ("now", now)) * 2
    for requests, contexts in cases:
        lengths, room = contexts_of(contexts, requests)
        g = torch.Generator().manual_seed(0)
        asked = [torch.randint(0, 1000, (length,), generator=g).tolist() for length in lengths]
        prompts: dict[str, list[int]] = {"before": [], "now": []}
        decoders: list[SpeculativeDecoder] = []
        for name, rule in ways:
            use(rule)
            decoder = captured_decoder(
                platform, target, head, num_speculative_tokens=5, max_num_requests=requests,
                max_model_len=min(max(max(lengths) + 700, room), longest), synthetic_acceptance=0.6, lowering="round",
            )  # fmt: skip
            add_prompts(decoder, asked)
            prompts[name].append(round(seconds_per_round(decoder, 1) * 1e6))  # the first step runs the prompts
            for _ in range(3):
                decoder.step()
            decoders.append(decoder)
        use(now)
        seconds = rounds_in_turns(decoders, turns=12, rounds=4, lead=1)
        captures = [(name, [s * 1e6 for s in each]) for (name, _), each in zip(ways, seconds, strict=True)]
        us = {each: median(t for name, times in captures if name == each for t in times) for each in ("before", "now")}
        row = {"requests": requests, "contexts": contexts, "before_us": round(us["before"]), "now_us": round(us["now"])}
        yield row | {"ratio": round(us["now"] / us["before"], 4), "prompts_us": prompts, "captures_us": captures}
        while decoders:
            decoders.pop().close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--rounds", default="32:uneven,32:even,8:even,1:even,64:even,8:uneven", help="requests:contexts"
    )
    parser.add_argument("--proposes", default=PROPOSES, help="shape:requests")
    parser.add_argument("--alone", default="all", help="all, or none")
    asked = parser.parse_args()
    now = device_kernels.attention_for
    using: list[ChooseAttention] = [now]
    device_kernels.attention_for = lambda shape: using[0](shape)  # before the platform registers its kernels
    platform = open_platform(asked.platform)
    device_kernels.attention_for = now
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]), "device": platform.info.device_name,
        "versions": dict(platform.info.versions), "tile": "rows, keys, splits, warps, stages, span", "alone": [],
    }  # fmt: skip

    def use(rule: ChooseAttention) -> None:
        using[0] = rule

    if asked.alone == "all":
        compile_all(asked.platform)
    with torch.inference_mode():
        rates = measure_rates(platform, torch.bfloat16)
        for kind, requests, contexts in CASES if asked.alone == "all" else []:
            problem = Problem(kind, requests, contexts, platform.device)
            row: dict[str, Any] = {"kind": kind, "requests": requests, "contexts": contexts}
            row |= {"floor_us": round(problem.bytes / rates.bytes_per_second * 1e6, 1), **time_alone(platform, problem)}
            report["alone"].append(row)
            print({key: row[key] for key in row if key != "tiles"}, row["tiles"][0], flush=True)
            asked.json.write_text(json.dumps(report) + "\n")
            del problem
        proposes = [(shape, int(n)) for shape, n in (each.split(":") for each in asked.proposes.split(",") if each)]
        rounds = [(int(n), contexts) for n, contexts in (each.split(":") for each in asked.rounds.split(",") if each)]
        for row in time_proposes(platform, use, proposes):
            report.setdefault("proposes", []).append(row)
            print(row, flush=True)
            asked.json.write_text(json.dumps(report) + "\n")
        for row in time_rounds(platform, use, rounds) if rounds else []:
            report.setdefault("rounds", []).append(row)
            print({key: row[key] for key in row if key != "captures_us"}, flush=True)
            asked.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()

"""Times attention in several ways: alone, in proposes and in rounds.

    python benchmarks/attention_tiles.py --json FILE

The ways: `shipped` are the tiles of the `cuda` backend; `two` has two splits, and `uncut` none, where the backend cuts
contexts only because block tables may hold long ones. Attention has 32 heads of 128 over 8 KV heads, bfloat16, blocks
of 16. Alone: microseconds per call in a graph over as many layers' caches as keep them out of the L2, all in turns,
also with other splits, and the relative error of each against `shipped`. Contexts are 1024 ("even"), 1024 or 1100 in
block tables for 4096 ("wide", "wider"), 1024 in block tables for 16384 ("widest"), 1024 in caches in e4m3 ("fp8"), 200
to 4000 ("uneven") or 32768 ("long"). Rounds: lowering `round`, K = 5, decoders of all ways in turns, with KV blocks for
the tokens they hold; `prompts_us` is the round that takes in all prompts. Proposes: lowering `merged`, in turns, two
captures of each.
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
from attention_problem import BLOCK, Problem, contexts_of

from specgraph import Request, SpeculativeDecoder, open_platform
from specgraph.device import Platform
from specgraph.ops.triton.launch import (
    AttentionShape,
    AttentionTile,
    ChooseAttention,
)
from specgraph.tools.floor import measure_rates
from specgraph.tools.propose import BenchCase, bench_propose
from specgraph.tools.rounds import (
    TARGETS,
    captured_decoder,
    random_target,
    rounds_in_turns,
    seconds_per_round,
)
from specgraph.tools.shapes import SHAPES, random_head
from specgraph.tools.timing import device_time
from specgraph.tools.tune import triton_ops

Case = tuple[str, int, str]
CASES: list[Case] = [
    *[("verify", n, "even") for n in (1, 8, 16, 32, 64)], *[("verify", n, "uneven") for n in (8, 32, 64)],
    *[("verify", n, "wide") for n in (8, 32, 64)], ("verify", 1, "long"),
    ("verify", 32, "wider"), ("verify", 64, "wider"),
    *[("draft", n, "even") for n in (1, 8, 32, 64)],
    ("draft", 1, "long"), ("draft", 32, "uneven"), *[("block", n, "even") for n in (1, 8, 32)], ("tree", 8, "even"),
    ("prompt", 1, "even"), ("prompt", 1, "long"), *[("draft", n, "fp8") for n in (8, 32, 64)], ("verify", 32, "fp8"),
]  # fmt: skip
"""Kind of attention, requests, contexts."""
MOST_TOKENS = 700
"""Tokens that a request may generate while rounds are timed."""
PROPOSES = ",".join(f"eagle3-llama3-8b:{n}" for n in (1, 8, 32, 64)) + ",dflash-qwen3-8b:8,dflash-qwen3-8b:32"


def shipped(shape: AttentionShape) -> AttentionTile:
    """The backend's tile, whatever was patched since."""
    return _shipped(shape)


_shipped = device_kernels.attention_for


def uncut(shape: AttentionShape) -> AttentionTile:
    """The backend's tiles, without a cut for contexts that may be long."""
    tile = shipped(shape)
    return replace(tile, splits=1, span=0) if tile.span else tile


def two(shape: AttentionShape) -> AttentionTile:
    """The backend's tiles, with two splits there."""
    tile = shipped(shape)
    return replace(tile, splits=2) if tile.span else tile


WAYS: dict[str, ChooseAttention] = {"shipped": shipped, "two": two, "uncut": uncut}


def tiles_of(shape: AttentionShape) -> dict[str, AttentionTile]:
    """What is timed alone, by name: the ways, and the backend's tile with other splits and stages."""
    found = {name: tile(shape) for name, tile in WAYS.items()}
    tile = shipped(shape)
    others = [replace(tile, splits=splits) for splits in (tile.splits * 2, tile.splits // 2) if 1 < splits <= 64]
    others += [replace(tile, span=span) for span in (512, 1024, 2048) if tile.span not in (0, span)]
    for each in others:
        found[f"{each.splits} splits of {each.span} keys"] = each
    return found


def with_tile(ops: Any, tile: AttentionTile) -> Any:
    """These Triton ops, with this tile for every attention."""

    def always(shape: AttentionShape) -> AttentionTile:
        return tile

    return type(ops)(replace(ops.options, attention=always))


def compile_all(name: str, cases: list[Case]) -> None:
    """Fill Triton's cache from several processes."""
    if not cases:
        return
    count = min(12, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.starmap(_compile, [(name, cases, i, count) for i in range(count)])


def _compile(name: str, cases: list[Case], part: int, count: int) -> None:
    platform = open_platform(name)
    ops, index = triton_ops(platform), 0
    for case in cases:
        problem = Problem(*case, platform.device, layers=1)
        for tile in tiles_of(problem.shape(ops.options.compute_units)).values():
            index += 1
            if index % count == part:
                with contextlib.suppress(Exception):  # it is found again when it is timed
                    problem.call(with_tile(ops, tile), 0)


def time_alone(platform: Platform, problem: Problem) -> dict[str, Any]:
    """Microseconds per call, and relative errors against `shipped`."""
    ops = triton_ops(platform)
    tiles = tiles_of(problem.shape(ops.options.compute_units))
    graphs: dict[str, Any] = {}
    errors: dict[str, float] = {}
    want = None
    for name, tile in tiles.items():
        mine = with_tile(ops, tile)
        try:
            got = problem.call(mine, 0).double()
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            continue
        want = got if want is None else want
        errors[name] = round(float((got - want).norm() / want.norm()), 6)
        graphs[name] = platform.graph()
        with graphs[name].capture():
            for layer in range(problem.layers):
                problem.call(mine, layer)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(4):
        for name in random.Random(turn).sample(list(graphs), len(graphs)):
            times[name] += device_time(platform, graphs[name].replay, repeats=5, warmup=1)
    for graph in graphs.values():
        graph.close()
    us = {name: round(median(each) / problem.layers, 2) for name, each in times.items()}
    return {"us": us, "errors": errors, "tile": list(astuple(tiles["shipped"]))}


def time_proposes(
    platform: Platform, use: Callable[[str], None], cases: list[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Microseconds of whole proposes, each capture's median."""
    for shape, requests in cases:
        case = BenchCase(
            shape=shape, requests=requests, k=15 if "dflash" in shape else 5, context=1024, lowerings=("merged",),
            repeats=25,
        )  # fmt: skip
        times: dict[str, list[float]] = {"shipped": [], "uncut": []}
        for name in list(times) * 2:
            use(name)
            times[name].append(bench_propose(platform, case, dtype=torch.bfloat16)[0]["device_us"])
        yield {"shape": shape, "requests": requests, "k": case.k, "us": times}


def time_rounds(
    platform: Platform, use: Callable[[str], None], cases: list[tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    """Microseconds of whole rounds: medians over stretches of four rounds in turns."""
    longest = 16384
    target = random_target(TARGETS["llama3-8b"], platform.device, torch.bfloat16, longest)
    head = random_head(SHAPES["eagle3-llama3-8b"], platform.device, torch.bfloat16, longest)
    for requests, contexts in cases:
        lengths, room = contexts_of(contexts, requests)
        g = torch.Generator().manual_seed(0)
        asked = [torch.randint(0, 1000, (length,), generator=g).tolist() for length in lengths]
        prompts: dict[str, int] = {}
        decoders: list[SpeculativeDecoder] = []
        for name in WAYS:
            use(name)
            decoder = captured_decoder(
                platform, target, head, num_speculative_tokens=5, max_num_requests=requests, block_size=BLOCK,
                max_model_len=max(max(lengths) + MOST_TOKENS, room), synthetic_acceptance=0.6, lowering="round",
                num_blocks=sum((length + MOST_TOKENS) // BLOCK + 3 for length in lengths) + 1,
            )  # fmt: skip
            for prompt in asked:
                decoder.add(Request(prompt_token_ids=prompt, max_tokens=MOST_TOKENS))
            prompts[name] = round(seconds_per_round(decoder, 1) * 1e6)  # the first step runs the prompts
            for _ in range(3):
                decoder.step()
            decoders.append(decoder)
        seconds = rounds_in_turns(decoders, turns=15, rounds=4, lead=1)
        stretches = {name: [round(s * 1e6) for s in each] for name, each in zip(WAYS, seconds, strict=True)}
        us = {name: round(median(each)) for name, each in stretches.items()}
        row = {"requests": requests, "contexts": contexts, "us": us}
        row |= {"ratios": {name: round(us[name] / us["shipped"], 4) for name in WAYS}}
        yield row | {"prompts_us": prompts, "stretches_us": stretches}
        while decoders:
            decoders.pop().close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--rounds",
        default="32:wide,32:uneven,64:wide,64:uneven,8:wide,8:uneven,32:widest,1:even",
        help="requests:contexts",
    )
    parser.add_argument("--proposes", default=PROPOSES, help="shape:requests")
    parser.add_argument("--alone", default="all", help="all, or kind:requests:contexts")
    asked = parser.parse_args()
    using = ["shipped"]
    device_kernels.attention_for = lambda shape: WAYS[using[0]](shape)  # before the platform registers its kernels
    platform = open_platform(asked.platform)
    device_kernels.attention_for = _shipped
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]), "device": platform.info.device_name,
        "versions": dict(platform.info.versions), "alone": [],
        "tile": "rows, keys, splits, warps, stages, span",
    }  # fmt: skip

    def use(name: str) -> None:
        using[0] = name

    cases = CASES if asked.alone == "all" else [
        (kind, int(n), contexts) for kind, n, contexts in (each.split(":") for each in asked.alone.split(",") if each)
    ]  # fmt: skip
    compile_all(asked.platform, cases)
    with torch.inference_mode():
        rates = measure_rates(platform, torch.bfloat16)
        for kind, requests, contexts in cases:
            problem = Problem(kind, requests, contexts, platform.device)
            row: dict[str, Any] = {"kind": kind, "requests": requests, "contexts": contexts}
            row |= {"floor_us": round(problem.bytes / rates.bytes_per_second * 1e6, 1), **time_alone(platform, problem)}
            report["alone"].append(row)
            print(row, flush=True)
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
            print({key: row[key] for key in row if key != "stretches_us"}, flush=True)
            asked.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()

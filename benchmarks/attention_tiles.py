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
from torch import Tensor

from specgraph import EngineConfig, Request, SpeculativeDecoder, open_platform
from specgraph.attention import choose_attention
from specgraph.benchmarking.floor import measure_rates
from specgraph.benchmarking.propose import BenchCase, bench_propose
from specgraph.benchmarking.rounds import TARGETS, random_target, seconds_per_round
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

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
CASES = [
    *[("verify", n, "even") for n in (1, 8, 16, 32, 64)], *[("verify", n, "uneven") for n in (8, 32, 64)],
    *[("verify", n, "wide") for n in (8, 32, 64)], ("verify", 1, "long"),
    *[("draft", n, "even") for n in (1, 8, 32, 64)],
    ("draft", 1, "long"), ("draft", 32, "uneven"), *[("block", n, "even") for n in (1, 8, 32)], ("tree", 8, "even"),
    ("prompt", 1, "even"), ("prompt", 1, "long"), *[("draft", n, "fp8") for n in (8, 32, 64)], ("verify", 32, "fp8"),
]  # fmt: skip
"""Kind of attention, requests, contexts."""
PROPOSES = ",".join(f"eagle3-llama3-8b:{n}" for n in (1, 8, 32)) + ",dflash-qwen3-8b:8,dflash-qwen3-8b:32"
ROWS = {"draft": 1, "verify": 6, "block": 16, "tree": 16, "prompt": 512}
"""Rows per request of the kinds of attention that are timed."""
COPIED_BYTES = 600 << 20


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


class Problem:
    """One attention over the caches of several layers."""

    def __init__(
        self, kind: str, requests: int, contexts: str, device: torch.device, layers: int | None = None
    ) -> None:
        lengths, longest = contexts_of(contexts, requests)
        used = [-(-n // BLOCK) for n in lengths]
        self.kind, self.lengths, self.rows = kind, lengths, ROWS[kind]
        self.dtype = torch.float8_e4m3fn if contexts == "fp8" else torch.bfloat16
        self.bytes = sum(lengths) * KV_HEADS * DIM * 2 * self.dtype.itemsize
        self.layers = layers or min(64, max(4, -(-COPIED_BYTES // self.bytes)))
        g = torch.Generator(device).manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device).bfloat16()

        blocks = sum(used) + 1, BLOCK, KV_HEADS, DIM
        self.caches = [[make(*blocks).to(self.dtype) for _ in range(2)] for _ in range(self.layers)]
        width = -(-longest // BLOCK // 16) * 16
        order = iter((torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)) + 1).tolist())
        table = [[next(order) for _ in range(n)] + [0] * (width - n) for n in used]
        rows = requests * self.rows
        self.new = make(rows, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.query = self.new[0].contiguous()
        self.table = torch.tensor(table, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, rows + 1, self.rows, dtype=torch.int32, device=device)
        self.rotary = torch.randn(longest, DIM, device=device)
        self.positions = self.seq_lens.long() - 1
        self.slots = (
            self.table.gather(1, self.positions[:, None] // BLOCK)[:, 0].long() * BLOCK + self.positions % BLOCK
        )
        self.ancestors = (2 << (torch.arange(rows, device=device) % 16)) - 1  # each row a child of the one before

    def shape(self, units: int) -> AttentionShape:
        """What a tile is chosen by."""
        return AttentionShape(
            rows=self.rows * HEADS // KV_HEADS, pairs=len(self.lengths) * KV_HEADS, context=self.table.shape[1] * BLOCK,
            head_dim=DIM, itemsize=2, cache_itemsize=self.dtype.itemsize, compute_units=units,
        )  # fmt: skip

    def call(self, ops: Any, layer: int) -> Tensor:
        """Attend over one layer's cache."""
        where, options = (*self.caches[layer], self.table, self.seq_lens), {"scale": DIM**-0.5}
        if self.kind == "draft":
            new = *self.new, self.rotary, self.positions, self.slots
            return ops.rotate_store_attend(*new, *where, self.starts, query_len=1, **options)
        if self.kind == "tree":
            return ops.tree_attention(self.query, *where, self.ancestors, tree_len=16, **options)
        causal = self.kind != "block"
        return ops.paged_attention(self.query, *where, self.starts, query_len=self.rows, causal=causal, **options)


def contexts_of(name: str, requests: int) -> tuple[list[int], int]:
    """Contexts of the requests, and what their block tables have room for."""
    if name == "uneven":
        lengths = [200 + 3800 * i // max(requests - 1, 1) for i in range(requests)]
        random.Random(1).shuffle(lengths)
        return lengths, 4096
    length, longest = {"even": (1024, 1280), "fp8": (1024, 1280), "wide": (1024, 4096), "long": (32768, 32768)}[name]
    return [length] * requests, longest


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
    attention = choose_attention("auto", platform, [*target.attention_layers, *head.attention_layers], torch.bfloat16)
    now = device_kernels.attention_for
    for requests, contexts in cases:
        lengths, room = contexts_of(contexts, requests)
        config = EngineConfig(
            num_speculative_tokens=5, max_num_requests=requests,
            max_model_len=min(max(max(lengths) + 700, room), longest),
            capture_sizes=[requests], prefill_sizes=[512], mode="FULL_DECODE_ONLY", synthetic_acceptance=0.6,
            lowering="round", block_size=attention.block_size,
        )  # fmt: skip
        prompts: dict[str, list[int]] = {"before": [], "now": []}
        ways: list[tuple[str, SpeculativeDecoder, list[float]]] = []
        for name, rule in (("before", before), ("now", now)) * 2:
            use(rule)
            decoder = SpeculativeDecoder(target, head, platform, config, attention=attention.backend)
            decoder.capture()
            g = torch.Generator().manual_seed(0)
            for length in lengths:
                prompt = torch.randint(0, 1000, (length,), generator=g).tolist()
                decoder.add(Request(prompt_token_ids=prompt, max_tokens=400))
            prompts[name].append(round(seconds_per_round(decoder, 1) * 1e6))  # the first step runs the prompts
            for _ in range(3):
                decoder.step()
            ways.append((name, decoder, []))
        use(now)
        for turn in range(12):
            for _, decoder, times in random.Random(turn).sample(ways, len(ways)):
                times.append(seconds_per_round(decoder, 4, lead=1) * 1e6)
        us = {each: median(t for name, _, times in ways if name == each for t in times) for each in ("before", "now")}
        row = {"requests": requests, "contexts": contexts, "before_us": round(us["before"]), "now_us": round(us["now"])}
        row |= {"ratio": round(us["now"] / us["before"], 4), "prompts_us": prompts}
        yield row | {"captures_us": [[name, t] for name, _, t in ways]}
        while ways:
            ways.pop()[1].close()


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

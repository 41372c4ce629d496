"""Times a drafter and rounds that are split over the ranks which torchrun started, against the same on one rank.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --platform NAME --output FILE

Random weights. For each shape: the lowerings compared bit for bit over random rounds (`audit`); one propose per
lowering; the merged propose with its collectives taken out, whose tokens are wrong but which runs all other kernels, so
that the difference is what the collectives cost; whole rounds; and the first rank alone with the whole model. Sections
that would begin after `--seconds` are left out and listed. The first rank writes the file after each section.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from specgraph import open_platform
from specgraph.cli.env import environment
from specgraph.device import Platform
from specgraph.engine import Request
from specgraph.parallel import WHOLE, Ranks, TensorParallel, join_ranks
from specgraph.tools.audit import AuditCase, audit
from specgraph.tools.floor import DeviceRates, measure_rates
from specgraph.tools.propose import BenchCase, bench_propose
from specgraph.tools.rounds import captured_decoder, random_target
from specgraph.tools.shapes import random_head, shape_named

K, CONTEXT, ROUNDS = 5, 1024, 20
EVERY = ("eager", "step", "merged")
TARGET_LAYERS = {"eagle3-llama3-8b": 32, "eagle3-llama3-70b": 8, "eagle3-tiny-python": 4}
"""Decoder layers of the target whose rounds are timed; 70B has 80."""


def check(platform: Platform, shape: str, dtype: torch.dtype, split: TensorParallel) -> list[dict[str, Any]]:
    """The lowerings over random rounds, bit for bit."""
    head = random_head(shape_named(shape), platform.device, dtype, 256, split)
    case = AuditCase(
        rounds=16, max_num_requests=4, num_speculative_tokens=K, vocab_size=shape_named(shape).vocab_size,
        lowerings=("step", "merged"),
    )  # fmt: skip
    report = audit(platform, head, case)
    return [{"shape": shape, "ranks": split.size, **report}]


def proposes(
    platform: Platform, shape: str, dtype: torch.dtype, split: TensorParallel, rates: DeviceRates, lowerings: Any
) -> list[dict[str, Any]]:
    """One propose in each lowering, for one request and for eight."""
    rows: list[dict[str, Any]] = []
    for requests in (1, 8):
        case = BenchCase(
            shape=shape, requests=requests, k=K, context=CONTEXT, lowerings=lowerings, torch_ops=False, repeats=30,
            tensor_parallel=split,
        )  # fmt: skip
        rows += bench_propose(platform, case, dtype=dtype, rates=rates)
    return [{"ranks": split.size, **row} for row in rows]


def without_collectives(*args: Any) -> list[dict[str, Any]]:
    """`proposes` with an all-reduce that does nothing and an all-gather that repeats the rank's own part."""

    def gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
        return torch.cat([x] * size)

    reduce = mock.patch("specgraph.ops.all_reduce", return_value=None)
    with reduce, mock.patch("specgraph.ops.all_gather", gather):
        return [{**row, "collectives": "taken out"} for row in proposes(*args, lowerings=("merged",))]


def rounds(platform: Platform, shape: str, dtype: torch.dtype, split: TensorParallel) -> list[dict[str, Any]]:
    """Milliseconds per round of a target and its drafter, and whether the lowerings generate the same tokens."""
    length, prompt = 512, 64
    sizes = replace(shape_named(shape), num_layers=TARGET_LAYERS[shape])
    target = random_target(sizes, platform.device, dtype, length, split)
    head = random_head(shape_named(shape), platform.device, dtype, length, split)
    rows: list[dict[str, Any]] = []
    for requests in (1, 8):
        tokens: list[Any] = []
        for lowering in ("eager", "merged", "round"):
            decoder = captured_decoder(
                platform, target, head, num_speculative_tokens=K, max_num_requests=requests, max_model_len=length,
                prefill_sizes=[prompt], decode=lowering, prefill="eager",
            )  # fmt: skip
            g = torch.Generator().manual_seed(0)
            prompts: list[list[int]] = torch.randint(0, target.vocab_size, (requests, prompt), generator=g).tolist()
            stream = decoder.stream([Request(prompt_token_ids=each, max_tokens=length - prompt) for each in prompts])
            given: dict[int, list[int]] = {}
            times: list[float] = []
            for part in range(5):
                platform.synchronize()
                start = time.perf_counter()
                for _ in range(requests * (2 if part == 0 else ROUNDS // 2)):
                    chunk = next(stream)
                    given.setdefault(chunk.request, []).extend(chunk.token_ids)
                platform.synchronize()
                times.append((time.perf_counter() - start) / (ROUNDS // 2) * 1e3)
            short = {request: ids[: 4 * ROUNDS // 4] for request, ids in given.items()}
            tokens.append(short)
            launches = sum(sum(runner.launches.values()) for runner in decoder.runners.values())
            rows.append(
                {"shape": shape, "target_layers": sizes.num_layers, "ranks": split.size, "requests": requests,
                 "decode": lowering, "round_ms": round(statistics.median(times[1:]), 3), "launches": launches,
                 "same_tokens": short == tokens[0]}
            )  # fmt: skip
            decoder.close()
    return rows


def main() -> None:
    """Every section, in the order of their importance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="eagle3-llama3-8b,eagle3-llama3-70b")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--sections", default="", help="only sections whose name has this in it, such as rounds")
    given = parser.parse_args()
    begin = time.monotonic()
    platform = open_platform(given.platform)
    ranks: Ranks = join_ranks(platform.device, given.ranks, timeout=300)
    split, dtype = ranks.tensor_parallel, torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    command = f"torchrun --nproc-per-node {given.ranks} {' '.join(sys.argv)}"
    result: dict[str, Any] = {
        "command": command, **environment(platform), "ranks": given.ranks, "k": K, "context": CONTEXT,
        "dtype": str(dtype), "weights": "random", "seconds": {}, "left_out": [],
    }  # fmt: skip

    def section(name: str, run: Callable[[], list[dict[str, Any]]], alone: bool = False) -> None:
        if given.sections not in name:
            return
        late = [time.monotonic() - begin > given.seconds if ranks.rank == 0 else False]
        if any(value[0] for value in ranks.exchange(f"the start of {name}", [int(late[0])])):
            result["left_out"].append(name)
            return
        start = time.monotonic()
        found = run() if ranks.rank == 0 or not alone else []
        ranks.exchange(f"the end of {name}")
        result[name] = found
        result["seconds"][name] = round(time.monotonic() - start, 1)
        if ranks.rank == 0:
            given.output.write_text(json.dumps(result, indent=1))
            print(f"{time.monotonic() - begin:6.1f} s  {name}", *found, sep="\n    ", flush=True)

    with torch.inference_mode():
        rates = DeviceRates(1e10, 1e11) if platform.device.type == "cpu" else measure_rates(platform, dtype)
        result["rates"] = {"bytes_per_second": rates.bytes_per_second, "flops_per_second": rates.flops_per_second}
        for shape in given.shapes.split(","):
            where = (platform, shape, dtype)
            section(f"{shape}: lowerings", lambda where=where: check(*where, split))
            section(f"{shape}: proposes", lambda where=where: proposes(*where, split, rates, EVERY))
            section(f"{shape}: without collectives", lambda where=where: without_collectives(*where, split, rates))
            section(f"{shape}: one rank", lambda where=where: proposes(*where, WHOLE, rates, ("merged",)), alone=True)
            section(f"{shape}: rounds", lambda where=where: rounds(*where, split))
            section(f"{shape}: rounds of one rank", lambda where=where: rounds(*where, WHOLE), alone=True)
    ranks.close()


if __name__ == "__main__":
    main()

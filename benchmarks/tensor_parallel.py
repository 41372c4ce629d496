"""Times a drafter and rounds that are split over the ranks which torchrun started, against the same on one rank.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --platform NAME --output FILE

Random weights. For each shape: the lowerings compared bit for bit over random rounds (`audit`); one propose per
lowering; the merged propose with its collectives taken out, whose tokens are wrong but which runs all other kernels, so
that the difference is what the collectives cost; whole rounds; and the first rank alone with the whole model. Sections
that would begin after `--seconds` are left out and listed. The first rank writes the file after each section.

With `--decode-context-parallel N` the same with keys that N ranks share, against ranks that have all keys each: merged
proposes and rounds, of shapes with one KV head.
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
from specgraph.models.latent import LatentConfig
from specgraph.parallel import WHOLE, TensorParallel, join_layout
from specgraph.tools.audit import AuditCase, audit
from specgraph.tools.floor import DeviceRates, measure_rates
from specgraph.tools.propose import BenchCase, bench_propose
from specgraph.tools.rounds import captured_decoder, random_target
from specgraph.tools.shapes import SHAPES, BenchShape, random_head, shape_named

K, ROUNDS = 5, 20
EVERY = ("eager", "step", "merged")
ROUND_LOWERINGS = ("eager", "merged", "round")
ONE_KV_HEAD = {
    "eagle3-8b-one-kv-head": replace(SHAPES["eagle3-llama3-8b"], num_kv_heads=1),
    "mtp-deepseek-v2-lite": BenchShape(
        2048, 10944, 16, 1, 576, 102400, 102400, num_aux=0, kind="mtp", rope_theta=10000.0,
        latent=LatentConfig(query_rank=None, rank=512, rotated=64, plain=128, value=128),
    ),
    "eagle3-tiny-one-kv-head": replace(SHAPES["eagle3-tiny-python"], num_kv_heads=1),
    "mtp-tiny-latents": BenchShape(
        192, 512, 4, 1, 48, 2048, 2048, num_aux=0, kind="mtp",
        latent=LatentConfig(query_rank=None, rank=32, rotated=16, plain=16, value=16),
    ),
}  # fmt: skip
"""Shapes whose keys two ranks can share: 8B's sizes with one KV head for its 32 query heads, and latents."""
TARGET_LAYERS = {
    "eagle3-llama3-8b": 32, "eagle3-llama3-70b": 8, "eagle3-tiny-python": 4, "eagle3-8b-one-kv-head": 32,
    "mtp-deepseek-v2-lite": 8, "eagle3-tiny-one-kv-head": 2, "mtp-tiny-latents": 2,
}  # fmt: skip
"""Decoder layers of the target whose rounds are timed; 70B has 80, DeepSeek-V2-Lite 27."""


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
    platform: Platform, shape: str, dtype: torch.dtype, context: int, split: TensorParallel, rates: Any, lowerings: Any
) -> list[dict[str, Any]]:
    """One propose in each lowering, for one request and for eight."""
    rows: list[dict[str, Any]] = []
    for requests in (1, 8):
        case = BenchCase(
            shape=shape, requests=requests, k=K, context=context, lowerings=lowerings, torch_ops=False, repeats=30,
            tensor_parallel=split,
        )  # fmt: skip
        rows += bench_propose(platform, case, dtype=dtype, rates=rates)
    return [{"ranks": split.size, "share_keys": sharing(split), **row} for row in rows]


def sharing(split: TensorParallel) -> int:
    """Return how many ranks share the keys of each request."""
    return 1 if split.context is None else split.context.size


def without_collectives(*args: Any) -> list[dict[str, Any]]:
    """`proposes` with an all-reduce that does nothing and an all-gather that repeats the rank's own part."""

    def gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
        return torch.cat([x] * size)

    reduce = mock.patch("specgraph.ops.all_reduce", return_value=None)
    with reduce, mock.patch("specgraph.ops.all_gather", gather):
        return [{**row, "collectives": "taken out"} for row in proposes(*args, lowerings=("merged",))]


def rounds(
    platform: Platform, shape: str, dtype: torch.dtype, context: int, split: TensorParallel, lowerings: Any
) -> list[dict[str, Any]]:
    """Milliseconds per round of a target and its drafter, and whether the lowerings generate the same tokens.

    Requests join with short prompts and are then moved to `context`, where they attend to what the caches hold: random
    keys.
    """
    prompt = 64
    length = context + 448
    sizes = replace(shape_named(shape), num_layers=TARGET_LAYERS[shape])
    target = random_target(sizes, platform.device, dtype, length, split)
    head = random_head(shape_named(shape), platform.device, dtype, length, split)
    rows: list[dict[str, Any]] = []
    for requests in (1, 8):
        tokens: list[Any] = []
        for lowering in lowerings:
            decoder = captured_decoder(
                platform, target, head, num_speculative_tokens=K, max_num_requests=requests, max_model_len=length,
                prefill_sizes=[prompt], decode=lowering, prefill="eager",
            )  # fmt: skip
            g = torch.Generator().manual_seed(0)
            prompts: list[list[int]] = torch.randint(0, target.vocab_size, (requests, prompt), generator=g).tolist()
            for part in (part for runner in decoder.runners.values() for cache in runner.caches for part in cache):
                part.normal_()
            stream = decoder.stream([Request(prompt_token_ids=each, max_tokens=length - prompt) for each in prompts])
            given: dict[int, list[int]] = {}
            next(stream)  # all have joined
            decoder.target.round.start_positions.add_(max(0, context - prompt))
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
                 "share_keys": sharing(split), "context": context, "decode": lowering, "launches": launches,
                 "round_ms": round(statistics.median(times[1:]), 3), "same_tokens": short == tokens[0]}
            )  # fmt: skip
            decoder.close()
    return rows


def main() -> None:
    """Every section, in the order of their importance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--decode-context-parallel", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--shapes", default="eagle3-llama3-8b,eagle3-llama3-70b")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--sections", default="", help="only sections whose name has this in it, such as rounds")
    given = parser.parse_args()
    begin = time.monotonic()
    platform = open_platform(given.platform)
    layout = join_layout(
        platform.device, tensor_parallel=given.ranks, decode_context_parallel=given.decode_context_parallel, timeout=300
    )
    ranks, split, context = layout.ranks, layout.tensor_parallel, given.context
    whole_keys = replace(split, context=None)
    dtype = torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    command = f"torchrun --nproc-per-node {given.ranks} {' '.join(sys.argv)}"
    result: dict[str, Any] = {
        **environment(platform), "command": command, "ranks": given.ranks, "k": K, "context": context,
        "dtype": str(dtype), "weights": "random", "seconds": {}, "left_out": [],
    }  # fmt: skip

    def write() -> None:
        if ranks.rank == 0:
            given.output.write_text(json.dumps(result, indent=1))

    def section(name: str, run: Callable[[], list[dict[str, Any]]], alone: bool = False) -> None:
        if given.sections not in name:
            return
        late = [time.monotonic() - begin > given.seconds if ranks.rank == 0 else False]
        if any(value[0] for value in ranks.exchange(f"the start of {name}", [int(late[0])])):
            result["left_out"].append(name)
            write()
            return
        start = time.monotonic()
        found = run() if ranks.rank == 0 or not alone else []
        ranks.exchange(f"the end of {name}")
        result[name] = found
        result["seconds"][name] = round(time.monotonic() - start, 1)
        write()
        if ranks.rank == 0:
            print(f"{time.monotonic() - begin:6.1f} s  {name}", *found, sep="\n    ", flush=True)

    with torch.inference_mode(), mock.patch.dict(SHAPES, ONE_KV_HEAD):
        if given.decode_context_parallel > 1:
            for shape in given.shapes.split(","):
                where = (platform, shape, dtype, context)
                for name, part in (("keys shared", split), ("all keys", whole_keys)):
                    tell = (where, part)
                    section(f"{shape}: proposes, {name}", lambda w=tell: proposes(*w[0], w[1], None, ("merged",)))
                    section(
                        f"{shape}: without collectives, {name}", lambda w=tell: without_collectives(*w[0], w[1], None)
                    )
                    section(f"{shape}: rounds, {name}", lambda w=tell: rounds(*w[0], w[1], ("merged",)))
            ranks.close()
            return
        rates = DeviceRates(1e10, 1e11) if platform.device.type == "cpu" else measure_rates(platform, dtype)
        result["rates"] = {"bytes_per_second": rates.bytes_per_second, "flops_per_second": rates.flops_per_second}
        for shape in given.shapes.split(","):
            where = (platform, shape, dtype, context)
            section(f"{shape}: lowerings", lambda where=where: check(*where[:3], split))
            section(f"{shape}: proposes", lambda where=where: proposes(*where, split, rates, EVERY))
            section(f"{shape}: without collectives", lambda where=where: without_collectives(*where, split, rates))
            section(f"{shape}: one rank", lambda where=where: proposes(*where, WHOLE, rates, ("merged",)), alone=True)
            section(f"{shape}: rounds", lambda where=where: rounds(*where, split, ROUND_LOWERINGS))
            section(
                f"{shape}: rounds of one rank", lambda where=where: rounds(*where, WHOLE, ROUND_LOWERINGS), alone=True
            )
    ranks.close()


if __name__ == "__main__":
    main()

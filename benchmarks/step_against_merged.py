"""Is a merged propose ever slower than a step-by-step one? Several captures of each, since two captures differ too.

    python benchmarks/step_against_merged.py --platform cuda --json FILE

The same graph captured twice may differ by a percent, by where its buffers lie. Replays take turns in an order drawn
anew each time; a capture counts with its median.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random
from statistics import median

import torch

from specgraph.benchmarking.shapes import random_head, shape_named
from specgraph.benchmarking.timing import device_time
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter, ProposeBatch
from specgraph.platforms import Platform, open_platform


def medians(platform: Platform, head, requests: int, a: argparse.Namespace) -> dict[str, list[float]]:
    """Device microseconds of one propose, one number per capture."""
    limit, per_request = a.context + 16, -(-(a.context + 16) // 16)
    g = torch.Generator().manual_seed(0)
    rows = requests * (a.k + 1)
    batch = ProposeBatch(
        sampled_token_ids=torch.randint(0, 1000, (requests, a.k + 1), generator=g).to(platform.device),
        num_sampled=torch.ones(requests, dtype=torch.int32, device=platform.device),
        start_positions=torch.full((requests,), a.context - 1, device=platform.device),
        aux_hidden=torch.randn(rows, head.aux_size, generator=g).to(platform.device, head.dtype),
        block_table=(torch.randperm(requests * per_request, generator=g) + 1)
        .view(requests, per_request)
        .int()
        .to(platform.device),
    )
    ways: list[tuple[str, Drafter, list[float]]] = []
    for _ in range(a.captures):
        for lowering in ("step", "merged"):
            config = DraftConfig(
                num_speculative_tokens=a.k, max_num_requests=requests, max_model_len=limit, capture_sizes=[requests],
                prefill_sizes=[16], lowering=lowering,
            )  # fmt: skip
            blocks = 1 + requests * per_request
            caches = allocate_caches(head.attention_layers, blocks, 16, head.dtype, platform.device)
            drafter = Drafter(head, caches, platform, config)
            drafter.capture()
            drafter.propose(batch)
            ways.append((lowering, drafter, []))
    order = Random(0)
    for _ in range(a.repeats):
        for _, drafter, times in order.sample(ways, len(ways)):
            inputs = drafter.inputs(requests)
            times += device_time(platform, lambda d=drafter, i=inputs: d.propose(i, copy=False), repeats=1, warmup=1)
    for _, drafter, _ in ways:
        drafter.close()
    return {name: [round(median(t), 1) for way, _, t in ways if way == name] for name in ("step", "merged")}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--captures", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    head = random_head(shape_named(a.shape), platform.device, getattr(torch, a.dtype), a.context + 16)
    rows = []
    with torch.inference_mode():
        for requests in map(int, a.requests.split(",")):
            rows.append({"requests": requests, **medians(platform, head, requests, a)})
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "shape": a.shape, "k": a.k,
        "context": a.context, "dtype": a.dtype,
        "command": "python benchmarks/step_against_merged.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Do eager, step and merged draft the same tokens, bit for bit, over many rounds of changing batches?

    python benchmarks/check_lowerings.py --platform cuda --shape eagle3-llama3-8b --rounds 2000 --json FILE

`specgraph audit` over a head of that shape with random weights, and, with --replays, whether memory grows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from specgraph.benchmarking.audit import AuditCase, audit
from specgraph.benchmarking.shapes import random_head, shape_named
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter
from specgraph.platforms import Platform, open_platform


def replays(platform: Platform, count: int) -> dict:
    """Reserved memory before and after `count` replays of one merged graph of a tiny head."""
    head = random_head(shape_named("eagle3-tiny-python"), platform.device, torch.bfloat16, 256)
    caches = allocate_caches(head.attention_layers, 17, 16, torch.bfloat16, platform.device)
    config = DraftConfig(num_speculative_tokens=5, max_num_requests=1, max_model_len=256, lowering="merged")
    drafter = Drafter(head, caches, platform, config)
    drafter.capture()
    inputs = drafter.inputs(1)
    drafter.propose(inputs, copy=False)
    platform.synchronize()
    before = platform.memory(), torch.cuda.mem_get_info()[0] if platform.device.type == "cuda" else 0
    start = time.perf_counter()
    for i in range(count):
        drafter.propose(inputs, copy=False)
        if i % 1000 == 0:
            platform.synchronize()
    platform.synchronize()
    after = platform.memory(), torch.cuda.mem_get_info()[0] if platform.device.type == "cuda" else 0
    drafter.close()
    return {
        "replays": count, "seconds": round(time.perf_counter() - start, 1),
        "allocated_growth_bytes": after[0].allocated - before[0].allocated,
        "reserved_growth_bytes": after[0].reserved - before[0].reserved,
        "device_free_change_bytes": after[1] - before[1],
    }  # fmt: skip


def main() -> None:
    """Parse, check, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=1100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--replays", type=int, default=0)
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    with torch.inference_mode():
        head = random_head(shape_named(a.shape), platform.device, getattr(torch, a.dtype), a.max_model_len)
        case = AuditCase(
            rounds=a.rounds, max_num_requests=a.requests, num_speculative_tokens=a.k, max_model_len=a.max_model_len,
            vocab_size=shape_named(a.shape).vocab_size,
        )  # fmt: skip
        found = audit(platform, head, case)
        report = {
            "device": platform.info.device_name, "versions": dict(platform.info.versions),
            "command": "python benchmarks/check_lowerings.py " + " ".join(sys.argv[1:]),
            "shape": a.shape, "k": a.k, "dtype": a.dtype, "max_model_len": a.max_model_len, "lowerings": found,
        }  # fmt: skip
        if a.replays:
            report["replays"] = replays(platform, a.replays)
    print(json.dumps(report, indent=1))
    if a.json:
        with open(a.json, "w") as file:
            json.dump(report, file, indent=1)
    if not found["equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

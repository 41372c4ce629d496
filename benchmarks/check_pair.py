"""Does the shipped pair accept as many draft tokens on this platform as on the CPU?

    python benchmarks/check_pair.py --platform cuda --json FILE

Greedy decoding of the same prompts on both; acceptance in all and per position. Two platforms never promise equal
bits, so single tokens may differ where two logits nearly tie: those prompts are counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from specgraph.decoding.text import load_generator
from specgraph.platforms import open_platform


def measure(platform, prompts: list[str], k: int, max_tokens: int, batch: int, lowering: str, dtype) -> dict:
    """Generate for every prompt, `batch` at a time."""
    generator = load_generator(
        platform=platform, num_speculative_tokens=k, max_num_requests=batch, lowering=lowering, dtype=dtype
    )
    requests = [generator.request(prompt, max_tokens=max_tokens) for prompt in prompts]
    tokens = [result.token_ids for result in generator.generate(requests)]
    metrics = generator.decoder.metrics
    generator.close()
    return {
        "platform": platform.info.name, "lowering": lowering, "dtype": str(dtype).removeprefix("torch."),
        "drafts": metrics.num_drafts, "mean_acceptance_length": round(metrics.mean_acceptance_length, 4),
        "per_position": [round(value, 4) for value in metrics.acceptance_per_position], "tokens": tokens,
    }  # fmt: skip


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--prompts", type=Path, default=Path("examples/tiny-python/prompts.jsonl"))
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    prompts = [json.loads(line)["text"] for line in a.prompts.read_text().splitlines()][: a.count]
    host, device = open_platform("cpu"), open_platform(a.platform)
    common = (prompts, a.k, a.max_tokens, a.batch)
    rows = [measure(host, *common, "merged", torch.float32)]
    for dtype in (torch.float32, torch.bfloat16):
        rows += [measure(device, *common, lowering, dtype) for lowering in ("eager", "step", "merged")]
    want = rows[0]
    for row in rows[1:]:
        row["length_over_cpu"] = round(row["mean_acceptance_length"] / want["mean_acceptance_length"], 4)
        row["prompts_with_other_tokens"] = sum(
            got != expected for got, expected in zip(row["tokens"], want["tokens"], strict=True)
        )
    for first in (1, 4):
        assert all(row["tokens"] == rows[first]["tokens"] for row in rows[first : first + 3]), "lowerings differ"
    for row in rows:
        del row["tokens"]
        print(json.dumps(row))
    report = {
        "device": device.info.device_name, "versions": dict(device.info.versions), "prompts": len(prompts),
        "max_tokens": a.max_tokens, "k": a.k, "batch": a.batch,
        "command": "python benchmarks/check_pair.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        with open(a.json, "w") as file:
            json.dump(report, file, indent=1)
    # float32 is what the CPU runs; bfloat16 is another model and is reported only
    if any(abs(row["length_over_cpu"] - 1) > 0.01 for row in rows[1:4]):
        raise SystemExit("acceptance differs from the CPU's by more than 1 %")


if __name__ == "__main__":
    main()

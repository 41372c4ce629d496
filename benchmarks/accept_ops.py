"""What accepting draft tokens costs: the device's own kernels against the plain torch references, each in a graph.

    python benchmarks/accept_ops.py --platform cuda --json benchmarks/results/h200-accept-ops.json

Logits of random numbers; drafts of a vocabulary map, at temperature 1. Medians in microseconds per call on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specgraph import kernels
from specgraph.benchmarking.shapes import shape_named
from specgraph.benchmarking.timing import device_time
from specgraph.platforms import Platform, open_platform

CALLS = 10
"""Calls per graph, so that the launch of the graph does not count."""


def in_a_graph(platform: Platform, call: Callable[[], Any]) -> float:
    """Microseconds of one of CALLS calls that one graph replays."""
    call()
    graph = platform.graph()
    with graph.capture():
        for _ in range(CALLS):
            call()
    found = median(device_time(platform, graph.replay, repeats=20)) / CALLS
    graph.reset()
    return round(found, 1)


def row(platform: Platform, requests: int, a: argparse.Namespace) -> dict[str, Any]:
    """The times of one batch size."""
    shape, device, g = shape_named(a.shape), platform.device, torch.Generator().manual_seed(0)
    vocab, drafted, rows = shape.vocab_size, shape.draft_vocab_size, requests * (a.k + 1)
    chosen = torch.randperm(vocab, generator=g)[:drafted].sort().values
    offsets = (chosen - torch.arange(drafted)).to(device)
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(device, getattr(torch, a.dtype))
    draft_ids = torch.randint(0, drafted, (requests, a.k), generator=g).to(device)
    drafts = draft_ids + offsets[draft_ids]
    probs = torch.softmax(torch.randn(requests, a.k, drafted, generator=g), -1).to(device)
    warmth, seeds = torch.ones(requests, device=device), torch.arange(requests, device=device)
    starts, chances = torch.full((requests,), a.context, device=device), torch.full((a.k,), 0.7, device=device)
    out = torch.zeros(requests, a.k + 1, dtype=torch.int64, device=device)
    into = (out, torch.zeros(requests, dtype=torch.int32, device=device))
    found: dict[str, Any] = {"requests": requests}
    for op, arguments in (
        (kernels.verify_greedy, (logits, drafts, starts)),
        (kernels.verify_sampled, (logits, drafts, probs, offsets, warmth, seeds, starts)),
        (kernels.verify_synthetic, (logits, drafts, chances, seeds, starts)),
    ):
        take: Any = op
        found[op.name] = {
            "device_us": in_a_graph(platform, lambda: take(*arguments, *into)),  # noqa: B023  (called at once)
            "torch_ops_us": in_a_graph(platform, lambda: take.reference(*arguments, *into)),  # noqa: B023
        }
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for requests in map(int, a.requests.split(",")):
            rows.append(row(platform, requests, a))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "shape": a.shape, "k": a.k,
        "dtype": a.dtype, "command": "python benchmarks/accept_ops.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

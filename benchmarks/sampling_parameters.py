"""What sampling parameters cost a round: the filters and penalties of a verify, and those of one draft step, in graphs.

    python benchmarks/sampling_parameters.py --platform cuda --json benchmarks/results/h200-sampling-parameters.json

Logits of random numbers; every request has top_p 0.9 and penalties. Medians in microseconds per call on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accept_ops import in_a_graph

from specgraph.benchmarking.shapes import shape_named
from specgraph.drafting import allocate_sampling
from specgraph.platforms import Platform, open_platform


def row(platform: Platform, requests: int, a: argparse.Namespace) -> dict[str, Any]:
    """The times of one batch size."""
    shape, device, g = shape_named(a.shape), platform.device, torch.Generator().manual_seed(0)
    vocab, drafted = shape.vocab_size, shape.draft_vocab_size
    offsets = (torch.randperm(vocab, generator=g)[:drafted].sort().values - torch.arange(drafted)).to(device)
    asked = allocate_sampling(requests, vocab, device)
    asked.top_p.fill_(0.9)
    asked.repetition_penalty.fill_(1.1)
    asked.frequency_penalty.fill_(0.2)
    dtype = getattr(torch, a.dtype)
    target = (torch.randn(requests * (a.k + 1), vocab, generator=g) * 3).to(device, dtype)
    draft = (torch.randn(requests, drafted, generator=g) * 3).to(device, dtype)
    drafts = torch.randint(0, vocab, (requests, a.k), generator=g).to(device)
    warm = torch.ones(requests, device=device)
    return {
        "requests": requests,
        "verify_us": in_a_graph(platform, lambda: asked.adjusted(target, drafts, warm)),
        "draft_step_us": in_a_graph(platform, lambda: asked.adjusted_drafts(draft, offsets, warm, drafts)),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("-k", type=int, default=5)
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
        "dtype": a.dtype, "command": "python benchmarks/sampling_parameters.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

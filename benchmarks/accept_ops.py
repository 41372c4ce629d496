"""What accepting draft tokens costs: the device's own kernels against the plain torch references, each in a graph.

    python benchmarks/accept_ops.py --platform cuda --json benchmarks/results/h200-accept-ops.json

Logits of random numbers; drafts of a vocabulary map, at temperature 1. Medians in microseconds per call on the device.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from op_times import in_a_graph, measure

from specgraph import ops
from specgraph.device import Platform
from specgraph.tools.shapes import shape_named


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
        (ops.verify_greedy, (logits, drafts, starts)),
        (ops.verify_sampled, (logits, drafts, probs, offsets, warmth, seeds, starts)),
        (ops.verify_synthetic, (logits, drafts, chances, seeds, starts)),
    ):
        take: Any = op
        found[op.name] = {
            "device_us": in_a_graph(platform, lambda: take(*arguments, *into)),  # noqa: B023  (called at once)
            "torch_ops_us": in_a_graph(platform, lambda: take.reference(*arguments, *into)),  # noqa: B023
        }
    return found


if __name__ == "__main__":
    measure(row, "accept_ops.py", context=1024)

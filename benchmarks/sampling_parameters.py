"""What sampling parameters cost a round: the filters and penalties of a verify, and those of one draft step, in graphs.

    python benchmarks/sampling_parameters.py --platform cuda --json benchmarks/results/h200-sampling-parameters.json

Logits of random numbers; every request has top_p 0.9 and penalties. Medians in microseconds per call on the device.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from op_times import in_a_graph, measure

from specgraph.device import Platform
from specgraph.draft import allocate_sampling
from specgraph.tools.shapes import shape_named


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


if __name__ == "__main__":
    measure(row, "sampling_parameters.py")

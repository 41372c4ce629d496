"""Triton kernels of the ops of the decoder, and the calls that try them on a device.

The modules here need `triton`; the decoder does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specgraph_run.decoder.ops.rejection import Acceptance, Sampled


def sampled_verify() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of a sampled verify: three requests with one draft, one greedy and one inert."""
    temperature, seeds = torch.tensor([0.0, 0.9, 1.3]), torch.tensor([1, 2**40, 3])
    yield (
        "verify_drafts",
        {
            "target_logits": torch.randn(6, 500, generator=torch.Generator().manual_seed(0)),
            "draft_token_ids": torch.tensor([[7], [3], [1]]),
            "start_positions": torch.tensor([4, 8, -1]),
            "acceptance": Acceptance(temperature, seeds, draft_probs=torch.full((3, 1, 500), 0.002)),
            "sampled": Sampled(torch.zeros(3, 2).long(), torch.zeros(3, dtype=torch.int32)),
        },
    )

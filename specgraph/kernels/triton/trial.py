"""A trial of the Triton ops on a device: small computations, compared with the plain torch references."""

from __future__ import annotations

import torch

from specgraph import kernels
from specgraph.kernels.triton.implement import TritonOps


def agrees_with_reference(ops: TritonOps, device: torch.device) -> str | None:
    """Paged attention over scattered blocks, and a greedy pick; what is wrong, or None."""
    g = torch.Generator().manual_seed(0)
    query = torch.randn(4, 4, 32, generator=g).to(device)
    caches = [torch.randn(6, 4, 2, 32, generator=g).to(device) for _ in range(2)]
    table, lens, starts = ([5, 2, 0], [1, 3, 4]), (7, 9), (0, 2, 4)
    args = (query, *caches, *(torch.tensor(t, dtype=torch.int32, device=device) for t in (table, lens, starts)))
    got = ops.paged_attention(*args, query_len=2, scale=32**-0.5)
    wanted = kernels.paged_attention.reference(*args, query_len=2, scale=32**-0.5)
    if not torch.allclose(got, wanted, atol=2e-2, rtol=2e-2):
        return "paged attention in Triton differs from plain torch"
    logits = torch.randn(3, 500, generator=g).to(device)
    step, tokens, drafts = (torch.zeros(s, dtype=torch.int64, device=device) for s in ((1,), (3,), (3, 2)))
    ops.draft_greedy(logits, None, step, tokens, drafts)
    return None if torch.equal(tokens, logits.argmax(1)) else "the greedy pick in Triton differs from argmax"

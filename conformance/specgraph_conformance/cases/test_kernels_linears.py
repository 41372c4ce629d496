"""Heads over many requests."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import (
    EPS,
    normed,
    random,
    uneven_rows,
)
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op

ROWS = 133
"""More than a tile of 128 rows, and no multiple of one."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.heads-of-many-requests",
    "For 133 requests the fused projections take the lowest id among equal logits, and write the distribution of "
    "float64's logits with the norm's own eps.",
    hazard="linears-of-many-rows",
    cause="greedy_head or gumbel_head: rows past a tile, a baked eps, or a maximum that takes the last of equals",
)
def test_heads(platform: Platform, way: str, seed: int) -> None:
    device, size, vocab = platform.device, 32, 700
    # Small integers: every sum is exact in float32, so that equal logits are equal in every order of the sums.
    x = torch.randint(-3, 4, (ROWS, size), generator=torch.Generator().manual_seed(seed)).float()
    weight = torch.randint(-3, 4, (vocab // 2, size), generator=torch.Generator().manual_seed(seed + 1)).float()
    weight = torch.cat((weight, weight.flip(0)))  # every logit twice
    rows, matrix = x.to(device), weight.to(device)
    ids, drafts = torch.full((ROWS,), -7, device=device), torch.full((ROWS, 2), -7, device=device)
    step = torch.tensor([1], device=device)
    run_op(platform, way, lambda: ops.greedy_head(rows, None, EPS, matrix, None, step, ids, drafts), [ids, drafts])
    best = torch.tensor([row.index(max(row)) for row in (x.double() @ weight.double().T).tolist()])
    expect_equal(on_host(ids), best, "the tokens of equal logits")
    expect_equal(on_host(drafts)[:, 1], best, "the column of the step")
    x, norm = uneven_rows(ROWS, size, torch.float32, seed + 2), 1 + random((size,), torch.float32, seed + 3) / 4
    weight = random((9, size), torch.float32, seed + 4, 0.3)
    probs = torch.zeros(ROWS, 2, 9, device=device)
    tensors = x, norm, weight, torch.full((ROWS,), 0.7), torch.arange(ROWS), torch.arange(ROWS).int() + 1
    rows, scale, matrix, temperature, seeds, lengths = (t.to(device) for t in tensors)
    written = ids, drafts, probs
    run_op(
        platform,
        way,
        lambda: ops.gumbel_head(rows, scale, EPS, matrix, None, temperature, seeds, lengths, step, ids, drafts, probs),
        written,
    )
    wanted = ((normed(x, norm) @ weight.double().T) / 0.7).softmax(-1)
    expect_close(on_host(probs)[:, 1], wanted, 1e-4, "the distributions of the fused sampling")

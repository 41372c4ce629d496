"""Each torch op that drafting uses gives the same bits in a replay as eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from specgraph.device import Platform
from torch import Tensor
from torch.nn import functional

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host, replay_and_wait

ROWS, WIDTH = 6, 64

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # (x float [ROWS, WIDTH], ids int64 [ROWS] below ROWS, out-of-place buffer like x)
    "linear": lambda x, i, b: x @ b.T,
    "addmm": lambda x, i, b: torch.addmm(x[:, :ROWS], x, b.T),
    "bmm": lambda x, i, b: torch.bmm(x.view(2, 3, WIDTH), b.view(2, 3, WIDTH).transpose(1, 2)),
    "embedding": lambda x, i, b: functional.embedding(i, x),
    "rms-norm": lambda x, i, b: functional.rms_norm(x, (WIDTH,), b[0]),
    "silu-mul": lambda x, i, b: functional.silu(x) * b,
    "softmax": lambda x, i, b: x.softmax(dim=-1),
    "argmax": lambda x, i, b: x.argmax(dim=-1),
    "gather": lambda x, i, b: x.gather(1, i[:, None].expand(ROWS, 4)),
    "index": lambda x, i, b: x[i],
    "index-copy": lambda x, i, b: b.clone().index_copy_(0, i, x),
    "index-put": lambda x, i, b: b.clone().index_put_((i,), x),
    "where": lambda x, i, b: torch.where(x > b, x, b),
    "cumprod": lambda x, i, b: (x > 0).long().cumprod(dim=1),
    "cat-split": lambda x, i, b: torch.cat(torch.cat([x, b], dim=1).split((WIDTH // 2, WIDTH, WIDTH // 2), 1)[::-1], 1),
    "scatter": lambda x, i, b: torch.zeros_like(x).scatter_(1, i[:, None], 1.0),
    "slices": lambda x, i, b: b.clone()[1:4].copy_(x[:3]).sum(dim=0),
    "integers": lambda x, i, b: ((i * 40503 + 7) ^ (i << 3)) & 1023,
    "bfloat16": lambda x, i, b: (x.bfloat16() @ b.bfloat16().T).float(),
    "strided": lambda x, i, b: x.T.contiguous().T + b[:, ::2].repeat_interleave(2, dim=1),
}


@pytest.mark.parametrize("op", OPS)
@case(
    "replay.op-equals-eager",
    "A replayed op gives the bits that the same op gives eagerly, for inputs written after its capture.",
    hazard="acceptance-hidden",
    cause="this op under capture: another kernel or workspace than eagerly, or baked inputs",
    needs=("graphs",),
    quick=True,
)
def test_ops(platform: Platform, op: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = platform.device
    x, b = torch.zeros(ROWS, WIDTH, device=device), torch.zeros(ROWS, WIDTH, device=device)
    ids = torch.zeros(ROWS, dtype=torch.int64, device=device)
    out = torch.zeros_like(OPS[op](x, ids, b))
    graph = captured(platform, lambda: out.copy_(OPS[op](x, ids, b)))
    for _ in range(2):
        x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        b.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        ids.copy_(torch.randperm(ROWS, generator=generator))
        replay_and_wait(platform, graph)
        expect_equal(on_host(out), on_host(OPS[op](x, ids, b)))

"""Ops of models that are split over ranks: each rank's part by the op, the whole by float64 on the host.

The collectives run in a group of one rank here: that shows what the op does with its tensors, eagerly and in a graph.
Between ranks they are tested by the group `collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.parallel import Ranks, join_ranks
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_equal, on_host, run_op

RANKS = 4


@pytest.fixture
def ranks(platform: Platform, tmp_path: Path) -> Iterator[Ranks]:
    """One rank, over the device's own communication library."""
    joined = join_ranks(platform.device, 1, init_method=f"file://{tmp_path / 'store'}", rank=0)
    yield joined
    joined.close()


def split_logits(seed: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Logits [rows, 400] of four parts with ties, zeros of both signs and only negative rows; and each row's best."""
    logits = torch.randn(rows, 400, generator=torch.Generator().manual_seed(seed)).to(dtype)
    logits[0, 150] = logits[0, 350] = 60.0  # a tie of two ranks: the smaller id wins
    logits[1] = -logits[1].abs() - 1
    logits[2] = -logits[2].abs() - 1
    logits[2, 210], logits[2, 320] = -0.0, 0.0  # equal
    return logits, [row.index(max(row)) for row in logits.double().tolist()]


def candidates(logits: Tensor) -> Tensor:
    """What the ranks gather of each other's best tokens."""
    part = logits.shape[1] // RANKS
    parts = [logits[:, rank * part : (rank + 1) * part].contiguous() for rank in range(RANKS)]
    return torch.stack([ops.best_tokens(each, rank * part) for rank, each in enumerate(parts)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@case(
    "kernels.draft-best",
    "The best of each rank's best tokens is the first most likely token of the whole vocabulary, as draft_greedy's.",
    hazard="draft-step-column",
    cause="best_tokens: the order of negative logits, of zeros or of ties; draft_best: the column, or the vocabulary",
    quick=True,
)
def test_draft_best(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    device = platform.device
    logits, best = split_logits(seed, 6, dtype)
    there, offsets = logits.to(device), (torch.arange(400) * 2).to(device)
    token_ids, drafts = torch.full((6,), -7, device=device), torch.full((6, 3), -7, device=device)
    step = torch.tensor([1], device=device)
    run_op(
        platform, way, lambda: ops.draft_best(candidates(there), offsets, step, token_ids, drafts),
        [token_ids, drafts],
    )  # fmt: skip
    assert on_host(token_ids).tolist() == [3 * b for b in best]
    assert on_host(drafts).tolist() == [[-7, 3 * b, -7] for b in best]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-best",
    "Drafts are accepted while they are the best of all ranks' best tokens; inert requests give none.",
    cause="verify_best: rows of another request, or an inert request that is counted",
    quick=True,
)
def test_verify_best(platform: Platform, way: str, seed: int) -> None:
    device, k = platform.device, 3
    logits, best = split_logits(seed, 5 * (k + 1), torch.float32)
    rows = [best[r * (k + 1) : (r + 1) * (k + 1)] for r in range(5)]
    accepted = [3, 0, 2, 1, 2]
    drafts = [[rows[r][i] if i < n else 399 - rows[r][i] for i in range(k)] for r, n in enumerate(accepted)]
    starts = [4, 0, 7, -1, 2]
    there = logits.to(device)
    sampled = torch.full((5, k + 1), -7, device=device)
    counts = torch.full((5,), -7, dtype=torch.int32, device=device)
    inputs = torch.tensor(drafts, device=device), torch.tensor(starts, device=device)
    run_op(platform, way, lambda: ops.verify_best(candidates(there), *inputs, sampled, counts), [sampled, counts])
    wanted = [
        [*rows[r][: n + 1], *[-1] * (k - n)] if starts[r] >= 0 else [-1] * (k + 1) for r, n in enumerate(accepted)
    ]
    assert on_host(sampled).tolist() == wanted
    assert on_host(counts).tolist() == [n + 1 if starts[r] >= 0 else 0 for r, n in enumerate(accepted)]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.collectives-of-one",
    "One rank: all_reduce leaves its tensor as it is, all_gather gives a copy.",
    hazard="merged-chain-collectives",
    cause="all_reduce or all_gather: an uninitialised result, or the input itself instead of a copy",
    needs=("collectives_in_graph",),
)
def test_one_rank(platform: Platform, ranks: Ranks, way: str, seed: int) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed))
    there, total, copy = (x.to(platform.device) for _ in range(3))

    def body() -> None:
        total.copy_(there)
        ops.all_reduce(total, ranks.name)
        copy.copy_(ops.all_gather(there, ranks.name, 1))

    run_op(platform, way, body, [total, copy])
    expect_equal(on_host(total), x)
    expect_equal(on_host(copy), x)

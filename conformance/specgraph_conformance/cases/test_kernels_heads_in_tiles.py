"""Heads of the sizes for which devices have kernels of their own: half precision, 512 input columns."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_kernels_noise import DRAFT, TEMPERATURE, drawn
from specgraph_conformance.linear_oracles import (
    EPS,
    head_of_ties,
    norm_weight,
    normed,
    random,
    small_integers,
    uneven_rows,
)
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op

SIZE = 512
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.mark.parametrize("rows", [1, 16, 24, 64])
@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.greedy-head-in-tiles",
    "With 512 input columns and 3,000 tokens in half precision the fused head takes the lowest of the most likely "
    "tokens, with and without a norm, as the target's id.",
    hazard="heads-in-tiles",
    cause="greedy_head: blocks of the vocabulary merged wrongly, the last of equals, the norm left out, or a row past "
    "the tile",
)
def test_greedy(platform: Platform, way: str, dtype: torch.dtype, rows: int, seed: int) -> None:
    device, vocab = platform.device, 3000
    x = small_integers((rows, SIZE), seed)
    weight, norm = head_of_ties(x, vocab, seed + 1), norm_weight(SIZE, dtype, seed + 3)
    offsets = torch.arange(vocab) * 2
    a, w, n, d2t = (t.to(device) for t in (x.to(dtype), weight.to(dtype), norm, offsets))
    ids = [torch.full((rows,), -7, device=device) for _ in range(2)]
    drafts = [torch.full((rows, 3), -7, device=device) for _ in range(2)]
    step = torch.tensor([1], device=device)

    def work() -> None:
        ops.greedy_head(a, None, EPS, w, d2t, step, ids[0], drafts[0])
        ops.greedy_head(a, n, EPS, w, d2t, step, ids[1], drafts[1])

    run_op(platform, way, work, [*ids, *drafts])
    for token_ids, columns, scale, what in zip(ids, drafts, (None, norm), ("without", "with"), strict=True):
        logits = normed(x, scale) @ weight.double().T
        best = torch.tensor([row.index(max(row)) for row in logits[:, : vocab // 2].tolist()])  # its twin is later
        expect_equal(on_host(token_ids), best * 3, f"the tokens {what} a norm")
        expect_equal(on_host(columns)[:, 1], best * 3, f"the column of the step {what} a norm")
        assert on_host(columns)[:, [0, 2]].unique().tolist() == [-7], "other columns were written"


@pytest.mark.parametrize(("requests", "steps"), [(1, 3), (5, 7), (10, 7)])
@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.greedy-block-head",
    "With 512 input columns and 3,000 tokens in half precision the fused head of a block takes the lowest of the most "
    "likely tokens of each row, with and without a norm, as the target's id, and writes no other column.",
    hazard="heads-in-tiles",
    cause="greedy_block_head: rows and columns exchanged, blocks of the vocabulary merged wrongly, the last of equals, "
    "the norm left out, or the vocabulary map not applied",
)
def test_block(platform: Platform, way: str, dtype: torch.dtype, requests: int, steps: int, seed: int) -> None:
    device, vocab, rows = platform.device, 3000, requests * steps
    x = small_integers((rows, SIZE), seed)
    weight, norm = head_of_ties(x, vocab, seed + 1, every=2), norm_weight(SIZE, dtype, seed + 3)
    offsets = torch.arange(vocab) * 2
    a, w, n, d2t = (t.to(device) for t in (x.to(dtype), weight.to(dtype), norm, offsets))
    drafts = [torch.full((requests, steps + 2), -7, device=device) for _ in range(2)]

    def work() -> None:
        for scale, out in zip((None, n), drafts, strict=True):
            ops.greedy_block_head(a, scale, EPS, w, d2t, out[:, :steps])

    run_op(platform, way, work, drafts)
    for columns, scale, what in zip(drafts, (None, norm), ("without", "with"), strict=True):
        logits = ((normed(x, scale) @ weight.double().T) * 1e6).round()  # twins are equal in any order of the sums
        best = torch.tensor([row.index(max(row)) for row in logits.tolist()])
        seen = on_host(columns)
        expect_equal(seen[:, :steps], best.view(requests, steps) * 3, f"the tokens {what} a norm")
        assert seen[:, steps:].unique().tolist() == [-7], "other columns were written"


@pytest.mark.parametrize("rows", [1, 20, 40])
@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.gumbel-head-in-tiles",
    "With 512 input columns in half precision the fused head draws the token that the noise of its request's seed and "
    "position picks, from the distribution that it writes.",
    hazard="heads-in-tiles",
    cause="gumbel_head: noise of another block of the vocabulary or of another row, or a softmax over a part of it",
)
def test_gumbel(platform: Platform, way: str, dtype: torch.dtype, rows: int, seed: int) -> None:
    device, vocab = platform.device, 300
    x, norm = uneven_rows(rows, SIZE, dtype, seed), norm_weight(SIZE, dtype, seed + 1)
    weight = random((vocab, SIZE), dtype, seed + 2, 2 * SIZE**-0.5)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=torch.Generator().manual_seed(seed))
    lengths = (torch.arange(rows) * 37 + 5).int()
    tensors = x, norm, weight, torch.full((rows,), TEMPERATURE), seeds, lengths
    a, n, w, temperature, numbers, seen = (t.to(device) for t in tensors)
    ids, drafts = torch.full((rows,), -7, device=device), torch.full((rows, 2), -7, device=device)
    probs, step = torch.zeros(rows, 2, vocab, device=device), torch.tensor([1], device=device)
    rest = temperature, numbers, seen, step, ids, drafts, probs
    run_op(platform, way, lambda: ops.gumbel_head(a, n, EPS, w, None, *rest), rest[4:])
    logits = normed(x, norm) @ weight.double().T
    expect_close(on_host(probs)[:, 1], (logits / TEMPERATURE).softmax(-1), 0.02, "the distributions")
    expect_equal(on_host(drafts)[:, 1], on_host(ids), "the column of the step")
    compared = 0
    for r in range(rows):
        wanted, lead = drawn(logits[r], int(seeds[r]), int(lengths[r]) + 1, DRAFT)
        if lead > 0.15:  # else the rounding of a logit may decide
            compared += 1
            assert int(ids[r]) == wanted, f"request {r} draws token {int(ids[r])} instead of {wanted}"
    assert compared >= rows // 2

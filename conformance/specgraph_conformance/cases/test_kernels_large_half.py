"""Picking and verifying tokens from logits in half precision over 9,000 tokens, and parameters over 131,072."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_kernels_noise import DRAFT, RESAMPLE, TEMPERATURE, drawn
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op

VOCAB, REQUESTS, K = 9000, 5, 2
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.logits-in-half",
    "Drafting and verifying from logits in half precision over 9,000 tokens take the lowest of equal ones, draw the "
    "token that the noise picks, and give float64's distributions.",
    hazard="large-vocabulary",
    cause="blocks of the vocabulary merged wrongly, the last of equals, or a softmax in the dtype of the logits",
)
def test_half(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    device, n = platform.device, REQUESTS * (K + 1)
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, VOCAB, generator=g) * 2).to(dtype)
    ties = logits.clone()
    for row in range(n):
        ties[row, torch.randperm(VOCAB, generator=g)[:4]] = 20.0
    best = torch.tensor([values.index(max(values)) for values in ties.tolist()]).view(REQUESTS, K + 1)
    offsets = torch.randint(0, 9, (VOCAB,), generator=g)
    seeds = torch.randint(-(1 << 62), 1 << 62, (REQUESTS,), generator=g)
    starts, counts = torch.arange(REQUESTS) * 31 + 3, (torch.arange(REQUESTS) % (K + 1) + 1).int()
    drafts = best[:, :K].clone()
    drafts[1, 1] += 1  # rejected
    temperature = torch.full((REQUESTS,), TEMPERATURE)
    tensors = logits, ties, offsets, seeds, starts, counts, drafts, temperature
    there, equal, d2t, numbers, at, sampled_before, given, warm = (t.to(device) for t in tensors)

    def full(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    block, drawn_block, probs = full(REQUESTS, K), full(REQUESTS, K), full(REQUESTS, K, VOCAB, dtype=torch.float32)
    ids, columns, one = full(REQUESTS), full(REQUESTS, K), full(REQUESTS, K, VOCAB, dtype=torch.float32)
    greedy, sampled = full(REQUESTS, K + 1), full(REQUESTS, K + 1)
    num = [full(REQUESTS, dtype=torch.int32) for _ in range(2)]
    step = torch.tensor([1], device=device)

    def work() -> None:
        by_request = equal.view(REQUESTS, K + 1, VOCAB)[:, :K].reshape(-1, VOCAB)
        ops.draft_block_greedy(by_request, d2t, block)
        rows = there[: REQUESTS * K]
        ops.draft_block_gumbel(rows, None, warm, numbers, at, sampled_before, drawn_block, probs)
        ops.draft_gumbel(there[:REQUESTS], None, warm, numbers, at.int(), step, ids, columns, one)
        ops.verify_greedy(equal, given, at, greedy, num[0])
        ops.verify_sampled(there, torch.full_like(given, -1), None, None, warm, numbers, at, sampled, num[1])

    run_op(platform, way, work, [block, drawn_block, probs, ids, columns, one, greedy, sampled, *num])
    expect_equal(on_host(block), best[:, :K] + offsets[best[:, :K]], "tokens of draft_block_greedy")
    wanted = best.clone()
    wanted[1, 2] = -1
    expect_equal(on_host(greedy), wanted, "tokens of verify_greedy")
    assert on_host(num[0]).tolist() == [2 if r == 1 else K + 1 for r in range(REQUESTS)]
    assert on_host(num[1]).tolist() == [1] * REQUESTS
    shares = (logits.double() / TEMPERATURE).softmax(-1)
    expect_close(on_host(probs), shares[: REQUESTS * K].view(REQUESTS, K, VOCAB), 1e-5, "draft_block_gumbel's shares")
    expect_close(on_host(one)[:, 1], shares[:REQUESTS], 1e-5, "draft_gumbel's shares")
    for r in range(REQUESTS):
        start, own = int(starts[r]), int(seeds[r])
        drawings = [(f"draft_block_gumbel, row {j}", int(drawn_block[r, j]), r * K + j,
                     start + int(counts[r]) + 1 + j, DRAFT) for j in range(K)]  # fmt: skip
        drawings += [("draft_gumbel", int(ids[r]), r, start + 1, DRAFT)]
        drawings += [("verify_sampled", int(sampled[r, 0]), r * (K + 1), start + 1, RESAMPLE)]
        for what, token, row, position, purpose in drawings:
            chosen, lead = drawn(logits[row].double(), own, position, purpose)
            assert token == chosen or lead < 1e-3, f"{what} of request {r}: token {token} instead of {chosen}"


@pytest.mark.parametrize("way", WAYS)
@HALVES
@case(
    "kernels.parameters-of-a-large-vocabulary",
    "Over 131,072 tokens top_k, top_p and min_p keep the tokens that a host sort keeps, the lower ids among equals, "
    "with penalties of tokens that were given up to 70,000 times.",
    hazard="large-vocabulary",
    cause="adjust_logits: equals at the cut of several blocks, a sort by block, or counts in few bits",
)
def test_parameters(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    device, vocab = platform.device, 131_072
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, vocab, generator=g) * 3).to(dtype)
    logits[1, torch.randperm(vocab, generator=g)[:60]] = 14.0  # more equals than top_k keeps
    top_k, top_p, min_p = [40, 25, 0, 300], [1.0, 1.0, 0.4, 0.8], [0.0, 0.0, 0.0, 0.02]
    none, ones = torch.zeros(4), torch.ones(4)
    warm = torch.tensor([0.7, 1.0, 0.6, 0.5])
    counts = torch.zeros(4, vocab, dtype=torch.int32)
    counts[:, 1::2] = torch.tensor([1, 255, 256, 70_000], dtype=torch.int32)[:, None]
    frequency = torch.tensor([0.0, 0.01, 0.01, 1e-4])
    arguments = [
        logits, torch.zeros(4, 0, dtype=torch.int64), warm, torch.tensor(top_k), torch.tensor(top_p),
        torch.tensor(min_p), ones, none, frequency, torch.zeros(4, vocab), counts,
        torch.zeros(4, vocab, dtype=torch.bool),
    ]  # fmt: skip
    there = [tensor.to(device) for tensor in arguments]
    out = torch.zeros(4, vocab, device=device)
    run_op(platform, way, lambda: out.copy_(ops.adjust_logits(*there)), [out])
    adjusted = logits.double() - frequency[:, None].double() * counts
    for r in range(4):
        p = (adjusted[r] / float(warm[r])).softmax(-1)
        order = torch.sort(-adjusted[r].float(), stable=True).indices  # the lower id first among equals
        order = order[p[order] >= min_p[r] * p.max()][: top_k[r] or vocab]
        share = p[order]
        before = share.cumsum(0) - share
        kept = order[before < top_p[r] * share.sum()] if top_p[r] < 1 else order
        now = (on_host(out)[r] > -1e29).nonzero()[:, 0]
        differ = set(now.tolist()) ^ set(kept.tolist())
        # Rounding of a sum decides about the last token of a share, and of equals about the last one.
        allowed = 2 if top_p[r] < 1 else 0
        assert len(differ) <= allowed, f"row {r} keeps {len(now)} tokens instead of {len(kept)}; {len(differ)} differ"
        both = kept[out[r].cpu()[kept] > -1e29]
        expect_close(on_host(out)[r][both], adjusted[r][both], 1e-5, f"logits kept in row {r}")

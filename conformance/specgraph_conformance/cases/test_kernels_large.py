"""Ops over a vocabulary of 70,000 tokens: ids that need more than 16 bits, and limits of how many tokens are kept."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op

VOCAB, REQUESTS, K = 70_000, 3, 2
BEST = torch.tensor([[69_999, 65_536, 17], [66_000, 3, 69_000], [65_535, 68_123, 67_001]])
"""The most likely token of each row of each request, far above the others."""


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.large-vocabulary",
    "Drafting, verifying, embedding and log-probabilities are exact for token ids above 65,535.",
    hazard="large-vocabulary",
    cause="a token id in 16 bits, a vocabulary cut at a fixed number of tiles, or their results merged wrongly",
)
def test_vocabulary(platform: Platform, way: str, seed: int) -> None:
    _pick(platform, way, VOCAB, BEST, seed)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.vocabulary-of-262-thousand",
    "Drafting, verifying and log-probabilities are exact for token ids up to 262,143.",
    hazard="large-vocabulary",
    cause="a vocabulary cut at a fixed number of tiles, or their results merged wrongly",
)
def test_262_thousand(platform: Platform, way: str, seed: int) -> None:
    best = torch.tensor([[262_143, 131_072, 17], [199_000, 131_071, 262_142], [65_536, 151_935, 262_143]])
    _pick(platform, way, 1 << 18, best, seed)


def _pick(platform: Platform, way: str, vocab: int, best: torch.Tensor, seed: int) -> None:
    """`best`: the most likely token of each row of each request, far above the others."""
    device, n = platform.device, REQUESTS * (K + 1)
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))
    logits[torch.arange(n), best.flatten()] = 60.0  # far above what noise can change
    there = logits.to(device)
    first, block = there.view(REQUESTS, K + 1, vocab)[:, 0].contiguous(), there[: REQUESTS * K]
    step = torch.zeros(1, dtype=torch.int64, device=device)
    temperature = torch.tensor([0.0, 0.8, 1.0]).to(device)
    seeds, starts = (torch.tensor(each, device=device) for each in ([5, 6, 7], [9, 10, 11]))
    lengths, counts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([8, 9, 10], [1, 2, 1]))

    def full(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    ids = {name: full(REQUESTS) for name in ("draft_greedy", "draft_gumbel", "draft_best")}
    columns, probs = full(REQUESTS, K), full(REQUESTS, K, vocab, dtype=torch.float32)
    blocks = {name: full(REQUESTS, K) for name in ("draft_block_greedy", "draft_block_gumbel")}
    sampled = {name: full(REQUESTS, K + 1) for name in ("verify_greedy", "verify_sampled")}
    num, logprobs = full(REQUESTS, dtype=torch.int32), full(REQUESTS, K + 1, dtype=torch.float32)
    accepted = best[:, :K].clone()
    accepted[1, 1] -= 1  # rejected
    drafts = accepted.to(device)

    def work() -> None:
        ops.draft_greedy(first, None, step, ids["draft_greedy"], columns)
        ops.draft_gumbel(first, None, temperature, seeds, lengths, step, ids["draft_gumbel"], columns, probs)
        half = vocab // 2
        parts = [ops.best_tokens(first[:, b : b + half].contiguous(), b) for b in (0, half)]
        ops.draft_best(torch.stack(parts), None, step, ids["draft_best"], columns)
        ops.draft_block_greedy(block, None, blocks["draft_block_greedy"])
        ops.draft_block_gumbel(block, None, temperature, seeds, starts, counts, blocks["draft_block_gumbel"], probs)
        ops.verify_greedy(there, drafts, starts, sampled["verify_greedy"], num)
        ops.verify_sampled(there, drafts, None, None, temperature, seeds, starts, sampled["verify_sampled"], num)
        ops.emitted_logprobs(there, sampled["verify_greedy"], logprobs)

    run_op(platform, way, work, [*ids.values(), columns, probs, *blocks.values(), *sampled.values(), num, logprobs])
    for name, tensor in ids.items():
        expect_equal(on_host(tensor), best[:, 0], f"tokens of {name}")
    for name, tensor in blocks.items():
        expect_equal(on_host(tensor), best.flatten()[: REQUESTS * K].view(REQUESTS, K), f"tokens of {name}")
    wanted = best.clone()
    wanted[1, 2] = -1
    for name, tensor in sampled.items():
        expect_equal(on_host(tensor), wanted, f"tokens of {name}")
    exact = torch.log_softmax(logits.double(), -1).view(REQUESTS, K + 1, vocab).gather(2, best[..., None])[..., 0]
    exact[1, 2] = 0.0
    expect_close(on_host(logprobs), exact, 1e-4, "log-probabilities")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.large-vocabulary-heads",
    "The fused heads are exact for token ids above 65,535.",
    hazard="large-vocabulary",
    cause="greedy_head or gumbel_head: a token id in 16 bits, or a last tile that is left out",
)
def test_heads(platform: Platform, way: str, seed: int) -> None:
    device, size = platform.device, 32
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, size, generator=g)
    best = BEST[:, 0]
    matrix = table.to(device)
    x = table[best] * 40.0  # the logit of its own token is far above the others'
    own, step = x.to(device), torch.zeros(1, dtype=torch.int64, device=device)
    ids = [torch.full((REQUESTS,), -7, device=device) for _ in range(2)]
    columns, probs = torch.full((REQUESTS, 1), -7, device=device), torch.zeros(REQUESTS, 1, VOCAB, device=device)
    temperature, seeds = torch.full((REQUESTS,), 0.9, device=device), torch.arange(REQUESTS, device=device)
    lengths = torch.tensor([4, 5, 6], dtype=torch.int32, device=device)

    def work() -> None:
        ops.greedy_head(own, None, 1e-6, matrix, None, step, ids[0], columns)
        ops.gumbel_head(own, None, 1e-6, matrix, None, temperature, seeds, lengths, step, ids[1], columns, probs)

    run_op(platform, way, work, [*ids, columns, probs])
    for name, tensor in zip(("greedy_head", "gumbel_head"), ids, strict=True):
        expect_equal(on_host(tensor), best, f"tokens of {name}")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.top-k-of-thousands",
    "top_k and top_p keep as many tokens as they ask for, also when those are thousands.",
    cause="adjust_logits: a fixed number of candidates, or a sort of part of the vocabulary",
)
def test_top_k(platform: Platform, way: str, seed: int) -> None:
    device, vocab, requests = platform.device, 9000, 3
    logits = torch.randn(requests, vocab, generator=torch.Generator().manual_seed(seed))
    top_k, top_p = [3000, 0, 5000], [1.0, 0.9, 0.95]
    none, ones = torch.zeros(requests), torch.ones(requests)
    arguments = [
        logits, torch.zeros(requests, 0, dtype=torch.int64), ones, torch.tensor(top_k), torch.tensor(top_p), none,
        ones, none, none, torch.zeros(requests, vocab), torch.zeros(requests, vocab, dtype=torch.int32),
        torch.zeros(requests, vocab, dtype=torch.bool),
    ]  # fmt: skip
    there = [tensor.to(device) for tensor in arguments]
    out = torch.zeros(requests, vocab, device=device)
    run_op(platform, way, lambda: out.copy_(ops.adjust_logits(*there)), [out])
    for r in range(requests):
        p = logits[r].double().softmax(-1).sort(descending=True).values[: top_k[r] or vocab]
        before = p.cumsum(0) - p
        wanted = int((before < top_p[r] * p.sum()).sum()) if top_p[r] < 1 else len(p)
        kept = int((on_host(out)[r] > -1e29).sum())
        assert abs(kept - wanted) <= 2, f"{kept} tokens kept for top_k {top_k[r]} and top_p {top_p[r]}, not {wanted}"

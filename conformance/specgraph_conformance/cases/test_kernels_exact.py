"""Decisions of sampling ops one by one, against float64 and the noise in Python integers; shares would hide them."""

from __future__ import annotations

import math

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.cases.test_kernels_noise import ACCEPT, RESAMPLE, uniform
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@case(
    "kernels.verify-decides-as-float64",
    "Each of 3,000 drafts is accepted, or replaced by the token, as float64 decides with the noise of its position.",
    hazard="verify-rounds-probabilities",
    cause="verify_sampled: probabilities rounded to the dtype of the logits, or noise of another purpose or position",
)
def test_decisions(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    requests, vocab, temperature = 3000, 6, 0.8
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(requests, 2, vocab, generator=g) * 1.5).to(dtype)
    q = (logits[:, 0].float() + torch.randn(requests, vocab, generator=g) * 0.5).softmax(-1)
    drafts = torch.multinomial(q, 1, generator=g)
    starts = torch.randint(0, 3000, (requests,), generator=g)
    seeds = torch.randint(-(1 << 62), 1 << 62, (requests,), generator=g)
    p = (logits.double() / temperature).softmax(-1)
    there = [
        t.to(platform.device)
        for t in (logits.flatten(0, 1), drafts, q[:, None], torch.full((requests,), temperature), seeds, starts)
    ]
    rows, tokens, probs, warm, numbers, at = there
    sampled = torch.full((requests, 2), -7, device=platform.device)
    counts = torch.full((requests,), -7, dtype=torch.int32, device=platform.device)
    run_op(
        platform,
        way,
        lambda: ops.verify_sampled(rows, tokens, probs, None, warm, numbers, at, sampled, counts),
        [sampled, counts],
    )
    seen, wrong, compared = on_host(sampled).tolist(), list[str](), 0
    for r in range(requests):
        draft, start, own = int(drafts[r]), int(starts[r]), int(seeds[r])
        ratio = float(p[r, 0, draft]) - uniform(own, start + 1, ACCEPT, 1)[0] * float(q[r, draft])
        accepted = ratio > 0
        share = p[r, 1] if accepted else (p[r, 0] - q[r].double()).clamp(min=0)
        noise = uniform(own, start + 1 + accepted, RESAMPLE, vocab)
        keys = sorted(
            (math.log(x) - math.log(-math.log(u)), token)
            for token, (x, u) in enumerate(zip(share.tolist(), noise, strict=True))
            if x > 1e-5  # rounding may leave less than that out, or in: it is hardly ever drawn
        )
        lead = keys[-1][0] - keys[-2][0] if len(keys) > 1 else 1.0
        wanted = [draft, keys[-1][1]] if accepted else [keys[-1][1], -1]
        if abs(ratio) < 1e-6 or lead < 1e-3:  # else rounding may decide
            continue
        compared += 1
        if seen[r] != wanted:
            wrong.append(f"request {r}: {seen[r]} instead of {wanted}")
    assert compared > 2900
    assert not wrong, f"{len(wrong)} of {compared} decisions are not float64's, the first: {wrong[0]}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@case(
    "kernels.ties-in-a-verify",
    "Of equally likely tokens the lowest id is the target's and the drafter's own, in every op that takes a maximum.",
    cause="a maximum over tiles, or by a reduction, that takes the last of equals: target and drafter disagree",
    quick=True,
)
def test_ties(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    device, requests, k, vocab = platform.device, 5, 3, 1500
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-20, 20, (requests * (k + 1), vocab), generator=g).to(dtype)  # each maximum several times
    best = torch.tensor([row.index(max(row)) for row in logits.tolist()]).view(requests, k + 1)
    drafts = best[:, :k].clone()
    starts, seeds, cold = torch.arange(requests), torch.arange(requests), torch.zeros(requests)
    there, given, at, numbers, temperature = (t.to(device) for t in (logits, drafts, starts, seeds, cold))
    sampled = [torch.full((requests, k + 1), -7, device=device) for _ in range(2)]
    counts = [torch.full((requests,), -7, dtype=torch.int32, device=device) for _ in range(2)]
    block = torch.full((requests, k + 1), -7, device=device)

    def work() -> None:
        ops.verify_greedy(there, given, at, sampled[0], counts[0])
        ops.verify_sampled(there, given, None, None, temperature, numbers, at, sampled[1], counts[1])
        ops.draft_block_greedy(there, None, block)

    run_op(platform, way, work, [*sampled, *counts, block])
    for name, tokens in (("verify_greedy", sampled[0]), ("verify_sampled", sampled[1]), ("draft_block_greedy", block)):
        expect_equal(on_host(tokens), best, f"tokens of {name}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@case(
    "kernels.logprobs-in-float32",
    "Log-probabilities over 5,000 tokens are float64's of the logits as they are given, in every dtype.",
    cause="emitted_logprobs: a log_softmax in the dtype of the logits",
)
def test_logprobs(platform: Platform, way: str, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(12, 5000, generator=g) * 3 + 20).to(dtype)
    ids = torch.randint(0, 5000, (4, 3), generator=g)
    ids[2, 1:] = -1
    rows, tokens = logits.to(platform.device), ids.to(platform.device)
    out = torch.full((4, 3), -7.0, device=platform.device)
    run_op(platform, way, lambda: ops.emitted_logprobs(rows, tokens, out), [out])
    wanted = torch.log_softmax(logits.double(), -1).gather(1, ids.clamp(min=0).view(-1, 1)).view(4, 3)
    expect_close(on_host(out), wanted.where(ids >= 0, torch.zeros_like(wanted)), 1e-4, "log-probabilities")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.parameters-of-a-drafter",
    "A drafter's logits follow bias, prompt, counts and penalties of the target's ids that its own ids stand for.",
    cause="adjust_logits: columns taken for target ids, or drafts of other rows counted",
)
def test_parameters(platform: Platform, way: str, seed: int) -> None:
    requests, vocab = 3, 20
    g = torch.Generator().manual_seed(seed)
    to_target = torch.tensor([1, 4, 5, 9, 13, 14, 19])
    logits = torch.randn(requests, len(to_target), generator=g) * 2
    drafted = torch.tensor([[4, 4, -1], [-1, -1, -1], [19, 9, 5]])
    counts = torch.randint(-6, 3, (requests, vocab), generator=g, dtype=torch.int32).clamp(min=0)
    prompt = torch.rand(requests, vocab, generator=g) < 0.4
    bias = torch.randn(requests, vocab, generator=g)
    repetition, presence, frequency = (
        torch.tensor(each) for each in ([1.5, 1.0, 0.8], [0.3, -0.4, 0.0], [0.2, 0.9, 1.1])
    )
    none, ones = torch.zeros(requests), torch.ones(requests)
    arguments = [
        logits, drafted, none, torch.zeros(requests, dtype=torch.int64), ones, none, repetition, presence, frequency,
        bias, counts, prompt, torch.full((requests,), -1), to_target - torch.arange(len(to_target)),
    ]  # fmt: skip
    there = [tensor.to(platform.device) for tensor in arguments]
    out = torch.zeros_like(there[0])
    run_op(platform, way, lambda: out.copy_(ops.adjust_logits(*there)), [out])
    wanted = logits.double().clone()
    for r in range(requests):
        for column, token in enumerate(to_target.tolist()):
            times = int(counts[r, token]) + drafted[r].tolist().count(token)
            x = float(logits[r, column]) + float(bias[r, token])
            if times or prompt[r, token]:
                x = x / float(repetition[r]) if x > 0 else x * float(repetition[r])
            wanted[r, column] = x - float(frequency[r]) * times - float(presence[r]) * bool(times)
    expect_close(on_host(out), wanted, 1e-5, "logits")

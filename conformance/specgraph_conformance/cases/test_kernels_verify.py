"""Acceptance of drafts: greedy, by rejection sampling, and synthetic, against exact distributions and float64."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.oracles import expect_shares
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-greedy",
    "Draft tokens are accepted while they are the target's most likely ones; the target's own follows, then -1.",
    cause="verify_greedy: an accepted count off by one, or an inert request that samples",
    quick=True,
)
def test_verify_greedy(platform: Platform, way: str, seed: int) -> None:
    device, k, vocab = platform.device, 3, 50
    logits = torch.randn(5 * (k + 1), vocab, generator=torch.Generator().manual_seed(seed))
    best = logits.argmax(-1).view(5, k + 1)
    drafts = best[:, :k].clone()
    drafts[1, 1] += 1
    drafts[2, 0] = (drafts[2, 0] + 1) % vocab
    drafts[3, 2] = -1
    starts = torch.tensor([5, 6, 7, 8, -1])
    sampled = torch.full((5, k + 1), -9, device=device)
    counts = torch.full((5,), -9, dtype=torch.int32, device=device)
    inputs = logits.to(device), drafts.to(device), starts.to(device)
    run_op(platform, way, lambda: ops.verify_greedy(*inputs, sampled, counts), [sampled, counts])
    assert on_host(counts).tolist() == [4, 2, 1, 3, 0]
    for r, count in enumerate([4, 2, 1, 3, 0]):
        wanted = [*drafts[r, : max(count - 1, 0)].tolist(), *([best[r, count - 1].item()] if count else [])]
        assert on_host(sampled)[r].tolist() == wanted + [-1] * (k + 1 - count)


@pytest.mark.parametrize("k", [9, 20])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.many-drafts-verified",
    "Of 9 and of 20 drafts per request as many are accepted as the target agrees with, from none to all, greedily, "
    "sampled and synthetically.",
    hazard="drafts-past-a-number",
    cause="verify_greedy, verify_sampled or verify_synthetic: drafts past a fixed number, or rows past a tile",
)
def test_many_drafts(platform: Platform, way: str, k: int, seed: int) -> None:
    device, requests, vocab = platform.device, k + 1, 40
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests * (k + 1), vocab, generator=generator)
    best = torch.randint(0, vocab, (requests, k + 1), generator=generator)
    logits[torch.arange(len(logits)), best.flatten()] = 60.0  # far above what noise can change
    drafts = best[:, :k].clone()
    for r in range(k):  # request r accepts r drafts, the last one all of them
        drafts[r, r] = (drafts[r, r] + 1) % vocab
    probs = torch.full((requests, k, vocab), 1 / vocab)
    tensors = logits, drafts, torch.arange(requests) * 7, torch.ones(requests), torch.arange(requests) * 3
    there, given, starts, warm, seeds = (t.to(device) for t in tensors)
    chances = torch.ones(k, device=device)
    uniform = probs.to(device)
    sampled = [torch.full((requests, k + 1), -9, device=device) for _ in range(4)]
    counts = [torch.full((requests,), -9, dtype=torch.int32, device=device) for _ in range(4)]

    def work() -> None:
        ops.verify_greedy(there, given, starts, sampled[0], counts[0])
        ops.verify_sampled(there, given, None, None, warm, seeds, starts, sampled[1], counts[1])
        ops.verify_sampled(there, given, uniform, None, warm, seeds, starts, sampled[2], counts[2])
        ops.verify_synthetic(there, given, chances, seeds, starts, sampled[3], counts[3])

    run_op(platform, way, work, [*sampled, *counts])
    names = "verify_greedy", "verify_sampled without distributions", "verify_sampled"
    for name, tokens, count in zip(names, sampled, counts, strict=False):
        for r in range(requests):
            wanted = [*best[r, : r + 1].tolist(), *[-1] * (k - r)]
            seen = on_host(tokens)[r].tolist()
            assert seen == wanted, f"{name}: request {r} of {k} drafts is given {seen} instead of {wanted}"
        assert on_host(count).tolist() == list(range(1, requests + 1)), f"counts of {name}"
    assert on_host(counts[3]).tolist() == [k + 1] * requests, "verify_synthetic with chances of 1"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-sampled",
    "Tokens after rejection sampling have the target's distribution for any drafter: chi-square test over two tokens.",
    hazard="gumbel-seed-position",
    cause="verify_sampled: noise shared between drafting and accepting, or a residual that isn't max(p - q, 0)",
)
def test_verify_sampled(platform: Platform, way: str, seed: int) -> None:
    device, draws, vocab, k = platform.device, 6000, 4, 2
    generator = torch.Generator().manual_seed(seed + 1)
    p_logits, q_logits = (torch.randn(k + 1, vocab, generator=generator) * 1.5 for _ in range(2))
    q = q_logits[:k].softmax(-1)
    start = torch.full((draws,), 20)
    temperature, seeds = torch.ones(draws, device=device), torch.arange(draws, device=device) * 7919
    drafts = torch.zeros(draws, k, dtype=torch.int64, device=device)
    probs = torch.zeros(draws, k, vocab, device=device)
    ids = torch.zeros(draws, dtype=torch.int64, device=device)
    for step in range(k):
        there = q_logits[step].expand(draws, vocab).contiguous().to(device)
        column = torch.tensor([step], device=device)
        # The draft token of column i has position start + 1 + i; its row attended to start + i + 1 keys.
        seq_lens = torch.full((draws,), 20 + step, dtype=torch.int32, device=device)
        ops.draft_gumbel(there, None, temperature, seeds, seq_lens, column, ids, drafts, probs)
    expect_close(on_host(probs)[0], q.double(), 1e-5, "the drafter's distributions")
    logits = p_logits.expand(draws, k + 1, vocab).reshape(-1, vocab).contiguous().to(device)
    sampled = torch.zeros(draws, k + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(draws, dtype=torch.int32, device=device)
    inputs = logits, drafts, probs, None, temperature, seeds, start.to(device)
    run_op(platform, way, lambda: ops.verify_sampled(*inputs, sampled, counts), [sampled, counts])
    p, seen, lengths = p_logits.double().softmax(-1), on_host(sampled), on_host(counts)
    for position in range(2):
        tokens = seen[lengths > position][:, position]
        expect_shares(tokens, p[position], f"token {position}", limit=21.1)  # 3 degrees of freedom: p = 1e-4
    accepted = (lengths > 1).double().mean()
    overlap = torch.minimum(p[0], q[0].double()).sum()
    assert abs(accepted - overlap) < 0.03, f"{accepted:.3f} accepted at position 0, {overlap:.3f} is the overlap"


TEMPERATURES = (0.0, 0.5, 2.0, 1.0, 1.0)
"""Of the five kinds of request of `ops.verify-mixed`, which alternate in one batch."""
VOCAB, DRAWS, K = 5, 2500, 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts_from", ["distribution", "draft-vocabulary", "one-token"])
@case(
    "kernels.verify-mixed",
    "In one batch of requests at temperatures 0, 0.5, 1 and 2, with and without draft tokens, some inert, each request "
    "follows the target's distribution at its own temperature.",
    hazard="mixed-requests-in-verify",
    cause="verify_sampled: one request's temperature for all, -1 taken for token 0, missing draft probabilities, or "
    "draft ids that are not mapped to the target's",
)
def test_verify_mixed(platform: Platform, way: str, drafts_from: str, seed: int) -> None:
    device, generator = platform.device, torch.Generator().manual_seed(seed + 5)
    kinds = len(TEMPERATURES)
    requests = kinds * DRAWS
    kind = torch.arange(requests) % kinds
    temperature = torch.tensor(TEMPERATURES)[kind]
    p_logits = torch.randn(kinds, K + 1, VOCAB, generator=generator) * 0.6
    mapped = drafts_from == "draft-vocabulary"
    ids = torch.tensor([1, 2, 4]) if mapped else torch.arange(VOCAB)
    q = (torch.randn(kinds, K, len(ids), generator=generator) * 0.6).softmax(-1)
    if drafts_from == "one-token":  # the drafter is certain: no distribution is handed over
        q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
    rows = q[kind].view(-1, len(ids))
    drafts = ids[torch.multinomial(rows, 1, generator=generator)[:, 0]].view(requests, K)
    drafts[kind == 3] = -1
    starts = torch.full((requests,), 20)
    starts[kind == 4] = -1
    sampled = torch.full((requests, K + 1), -9, device=device)
    counts = torch.full((requests,), -9, dtype=torch.int32, device=device)
    inputs = (
        p_logits[kind].view(-1, VOCAB).to(device),
        drafts.to(device),
        None if drafts_from == "one-token" else q[kind].contiguous().to(device),
        (ids - torch.arange(len(ids))).to(device) if mapped else None,
        temperature.to(device),
        (torch.arange(requests) * 7919).to(device),
        starts.to(device),
    )
    run_op(platform, way, lambda: ops.verify_sampled(*inputs, sampled, counts), [sampled, counts])
    tokens, lengths = on_host(sampled), on_host(counts)
    assert lengths[kind == 4].unique().tolist() == [0], "an inert request was given tokens"
    assert tokens[kind == 4].unique().tolist() == [-1], "an inert request was given tokens"
    assert lengths[kind == 3].unique().tolist() == [1], "a request without draft tokens (-1) had one accepted"
    greedy = p_logits[0].argmax(-1)
    for row, n in zip(tokens[kind == 0].tolist(), lengths[kind == 0].tolist(), strict=True):
        assert row[:n] == greedy[:n].tolist(), f"at temperature 0 a request got {row[:n]}, not {greedy[:n].tolist()}"
    for number in (1, 2, 3):
        mine, lens = tokens[kind == number], lengths[kind == number]
        wanted = (p_logits[number].double() / TEMPERATURES[number]).softmax(-1)
        for position in range(2 if number < 3 else 1):
            got = mine[lens > position][:, position]
            if len(got) >= 400:  # fewer accepted ones say nothing
                expect_shares(got, wanted[position], f"token {position} at temperature {TEMPERATURES[number]:g}")
        if number < 3:
            full = torch.zeros(VOCAB, dtype=torch.float64).index_copy_(0, ids, q[number, 0].double())
            overlap, seen = torch.minimum(wanted[0], full).sum(), (lens > 1).double().mean()
            assert abs(seen - overlap) < 0.05, (
                f"{seen:.3f} of the first drafts were accepted at temperature {TEMPERATURES[number]:g}; target and "
                f"drafter overlap by {overlap:.3f}"
            )


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-synthetic",
    "Draft token i is accepted with the given chance if those before it are; requests that are inert or have no draft "
    "token are as in verify_greedy.",
    hazard="synthetic-acceptance",
    cause="verify_synthetic: the chances of the wrong column, or -1 accepted",
)
def test_verify_synthetic(platform: Platform, way: str, seed: int) -> None:
    device, draws, k, vocab = platform.device, 4000, 3, 20
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(draws * (k + 1), vocab, generator=generator)
    best = logits.argmax(-1).view(draws, k + 1)
    drafts = torch.randint(0, vocab, (draws, k), generator=generator)
    drafts[1, 1] = -1
    starts = torch.arange(draws) % 100
    starts[2] = -1
    chances = torch.tensor([0.8, 0.5, 1.0])
    sampled = torch.full((draws, k + 1), -9, device=device)
    counts = torch.full((draws,), -9, dtype=torch.int32, device=device)
    seeds = torch.arange(draws) * 7919
    inputs = logits.to(device), drafts.to(device), chances.to(device), seeds.to(device), starts.to(device)
    run_op(platform, way, lambda: ops.verify_synthetic(*inputs, sampled, counts), [sampled, counts])
    tokens, lengths = on_host(sampled), on_host(counts)
    assert int(lengths[2]) == 0
    assert int(lengths[1]) <= 2, "draft token -1 was accepted"
    for r, count in enumerate(lengths.tolist()):
        if count:
            wanted = [*drafts[r, : count - 1].tolist(), int(best[r, count - 1]), *[-1] * (k + 1 - count)]
            assert tokens[r].tolist() == wanted, f"request {r}, of which {count - 1} drafts were accepted"
    rest = lengths[3:]
    for position, chance in enumerate(chances.tolist()):
        reached, accepted = (rest > position).sum(), (rest > position + 1).sum()
        share = float(accepted / reached)
        assert abs(share - chance) < 0.04, f"{share:.3f} of draft tokens {position} accepted, the chance is {chance:g}"

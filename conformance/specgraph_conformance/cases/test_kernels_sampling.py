"""Drafting and verification ops: exact tokens where greedy, distributions by chi-square where sampled."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.oracles import expect_shares
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mapped", [False, True], ids=["same-vocabulary", "own-vocabulary"])
@case(
    "kernels.draft-greedy",
    "The most likely token, mapped to the target's ids, goes to the next step and to its own column only.",
    hazard="draft-step-column",
    cause="draft_greedy: the column index, or the vocabulary map applied twice or not at all",
    quick=True,
)
def test_greedy(platform: Platform, way: str, mapped: bool, seed: int) -> None:
    device, generator = platform.device, torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 1000, generator=generator)
    logits[1, 17] = logits[1, 400] = 50.0  # a tie: the first index wins
    offsets = torch.arange(1000) * 2 if mapped else None
    token_ids = torch.full((5,), -7, device=device)
    drafts = torch.full((5, 3), -7, device=device)
    step = torch.tensor([1], device=device)
    on_device = None if offsets is None else offsets.to(device)
    there = logits.to(device)
    run_op(platform, way, lambda: ops.draft_greedy(there, on_device, step, token_ids, drafts), [token_ids, drafts])
    best = [row.index(max(row)) for row in logits.tolist()]
    wanted = [3 * b if mapped else b for b in best]
    assert on_host(token_ids).tolist() == wanted
    assert on_host(drafts).tolist() == [[-7, w, -7] for w in wanted]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.draft-gumbel",
    "Sampled tokens follow softmax(logits / temperature), and the distribution written is that one.",
    hazard="gumbel-seed-position",
    cause="draft_gumbel: noise that isn't Gumbel, or a temperature applied after it",
)
def test_gumbel(platform: Platform, way: str) -> None:
    device, draws, vocab = platform.device, 4000, 6
    logits = torch.tensor([0.3, 1.2, -0.5, 0.0, 2.0, -2.0])
    temperature = torch.full((draws,), 0.8)
    temperature[0] = 0.0
    there = logits.expand(draws, vocab).contiguous().to(device)
    token_ids, drafts = (
        torch.zeros(draws, dtype=torch.int64, device=device),
        torch.zeros(draws, 1, device=device).long(),
    )
    probs = torch.zeros(draws, 1, vocab, device=device)
    inputs = (
        temperature.to(device),
        torch.arange(draws, device=device),
        torch.full((draws,), 9, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    written = token_ids, drafts, probs
    run_op(platform, way, lambda: ops.draft_gumbel(there, None, *inputs, *written), written)
    wanted = (logits.double() / 0.8).softmax(0)
    expect_close(on_host(probs)[1, 0], wanted, 1e-5, "the distribution")
    assert on_host(token_ids)[0] == 4
    assert on_host(probs)[0, 0].tolist() == [0, 0, 0, 0, 1, 0]
    counts = on_host(token_ids)[1:].bincount(minlength=vocab).double()
    chi_square = ((counts - wanted * (draws - 1)) ** 2 / (wanted * (draws - 1))).sum()
    assert chi_square < 25.7, f"chi-square {chi_square:.1f} with 5 degrees of freedom"  # p = 1e-4
    expect_equal(on_host(drafts)[:, 0], on_host(token_ids))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mapped", [False, True], ids=["same-vocabulary", "own-vocabulary"])
@case(
    "kernels.draft-block-greedy",
    "The most likely token of each masked row, mapped to the target's ids, has the row's place in the draft tokens.",
    hazard="parallel-block-sampling",
    cause="draft_block_greedy: rows and columns exchanged, or the vocabulary map not applied",
    quick=True,
)
def test_block_greedy(platform: Platform, way: str, mapped: bool, seed: int) -> None:
    requests, k, vocab = 9, 4, 500
    logits = torch.randn(requests * k, vocab, generator=torch.Generator().manual_seed(seed))
    offsets = torch.arange(vocab) if mapped else None
    there, on_device = logits.to(platform.device), None if offsets is None else offsets.to(platform.device)
    drafts = torch.full((requests, k), -7, device=platform.device)
    run_op(platform, way, lambda: ops.draft_block_greedy(there, on_device, drafts), [drafts])
    best = torch.tensor([row.index(max(row)) for row in logits.tolist()]).view(requests, k)
    expect_equal(on_host(drafts), best * 2 if mapped else best, "the draft tokens")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.draft-block-gumbel",
    "Tokens of masked rows follow softmax(logits / temperature) at each request's own temperature, and the "
    "distributions written are those.",
    hazard="parallel-block-sampling",
    cause="draft_block_gumbel: the temperature left out of the distribution, or one request's temperature for all",
)
def test_block_gumbel(platform: Platform, way: str, seed: int) -> None:
    device, draws, k, vocab = platform.device, 3000, 2, 5
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([0.0, 0.5, 2.0])
    requests = 3 * draws
    kind = torch.arange(requests) % 3
    logits = torch.randn(3, k, vocab, generator=generator) * 0.6
    drafts = torch.full((requests, k), -7, device=device)
    probs = torch.full((requests, k, vocab), -7.0, device=device)
    inputs = (
        logits[kind].view(-1, vocab).to(device),
        None,
        temperatures[kind].to(device),
        (torch.arange(requests) * 7919).to(device),
        (torch.arange(requests) % 50).to(device),
        torch.full((requests,), 2, dtype=torch.int32, device=device),
    )
    run_op(platform, way, lambda: ops.draft_block_gumbel(*inputs, drafts, probs), [drafts, probs])
    tokens, seen = on_host(drafts), on_host(probs)
    best = logits[0].argmax(-1)
    expect_equal(tokens[kind == 0], best.expand(draws, k), "the draft tokens at temperature 0")
    one_hot = torch.nn.functional.one_hot(best, vocab).float()
    expect_equal(seen[kind == 0], one_hot.expand(draws, k, vocab), "the distributions at temperature 0")
    for number in (1, 2):
        at = f"at temperature {temperatures[number]:g}"
        wanted = (logits[number].double() / temperatures[number].double()).softmax(-1)
        difference = (seen[kind == number].double() - wanted).abs().max()
        assert difference < 1e-5, f"a distribution {at} is {difference:.3g} off softmax(logits / temperature)"
        for step in range(k):
            expect_shares(tokens[kind == number][:, step], wanted[step], f"draft token {step} {at}")
    assert not torch.equal(tokens[kind == 2][:, 0], tokens[kind == 2][:, 1]), "both rows of a block drew one noise"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.gumbel-head",
    "The fused norm, output projection and sampling write the distribution of float64's logits at each request's own "
    "temperature, and tokens that follow it.",
    hazard="fused-sampling",
    cause="gumbel_head: the norm or the temperature left out, one request's noise for all, or the column index",
)
def test_gumbel_head(platform: Platform, way: str, seed: int) -> None:
    device, draws, size, vocab = platform.device, 3000, 32, 5
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([0.0, 0.5, 2.0])
    requests = 3 * draws
    kind = torch.arange(requests) % 3
    x, norm = torch.randn(3, size, generator=generator), 1 + torch.randn(size, generator=generator) / 4
    weight = torch.randn(vocab, size, generator=generator) * 0.12
    ids = torch.full((requests,), -7, device=device)
    drafts = torch.full((requests, 3), -7, device=device)
    probs = torch.full((requests, 3, vocab), -7.0, device=device)
    lengths = (torch.arange(requests) % 50 + 1).int()
    tensors = x[kind], norm, weight, torch.arange(vocab), temperatures[kind], torch.arange(requests) * 7919, lengths
    rows, scale, matrix, offsets, temperature, seeds, seq_lens = (t.to(device) for t in tensors)
    step = torch.tensor([1], device=device)
    run_op(
        platform,
        way,
        lambda: ops.gumbel_head(
            rows, scale, 1e-6, matrix, offsets, temperature, seeds, seq_lens, step, ids, drafts, probs
        ),
        [ids, drafts, probs],
    )
    tokens, seen = on_host(ids), on_host(probs)[:, 1]
    expect_equal(on_host(drafts)[:, 1], tokens, "the column of the step")
    assert on_host(drafts)[:, [0, 2]].unique().tolist() == [-7], "another column was written"
    wide = x.double()
    logits = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double() @ weight.double().T
    best = int(logits[0].argmax())
    assert tokens[kind == 0].unique().tolist() == [2 * best], "at temperature 0 the token is not the most likely one"
    for number in (1, 2):
        wanted = (logits[number] / temperatures[number].double()).softmax(-1)
        at = f"at temperature {temperatures[number]:g}"
        expect_close(seen[kind == number], wanted.expand(draws, vocab), 1e-4, f"the distribution {at}")
        expect_shares(tokens[kind == number] // 2, wanted, f"tokens {at}")

"""Triton ops that choose draft tokens against float64 and the noise of their positions, at sizes where blocks end."""

from __future__ import annotations

import pytest
import torch
from against_float64 import close, make, triton_ops  # noqa: F401
from torch import Tensor

from specgraph import ops
from specgraph.ops.noise import DRAFT, gumbel


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 80])
@pytest.mark.parametrize("vocab", [32000, 500])
def test_greedy_head_picks_a_largest_logit(rows: int, vocab: int) -> None:
    x, norm, weight = make(rows, 4096), make(4096), make(vocab, 4096, scale=4096**-0.5)
    offsets = torch.randint(0, 50, (vocab,), device="cuda")
    step = torch.tensor([2], device="cuda")
    token_ids, result = torch.full((rows,), -7, device="cuda"), torch.full((rows, 4), -7, device="cuda")
    head = ops.Head(norm, 1e-5, weight)
    ops.draft_from_hidden(x, head, ops.Drafts(result, None, step, token_ids))
    logits = ops.norm_linear.reference(x.double(), ops.Norm(norm.double(), 1e-5), ops.Weight(weight.double()))
    picked = logits.gather(1, token_ids[:, None])[:, 0]
    assert bool((picked >= logits.amax(1) - 0.05).all())  # half a step of bf16 at the size of the largest logits
    assert torch.equal(result[:, 2], token_ids)
    assert bool((result[:, [0, 1, 3]] == -7).all())
    mapped = torch.empty_like(token_ids)
    ops.draft_from_hidden(x, head, ops.Drafts(result, offsets, step, mapped))
    assert torch.equal(mapped, token_ids + offsets[token_ids])


@pytest.mark.parametrize(("requests", "steps"), [(1, 15), (8, 15), (8, 16), (32, 15), (3, 7)])
@pytest.mark.parametrize("vocab", [32000, 151936, 500])
def test_the_head_of_a_block_picks_a_largest_logit(requests: int, steps: int, vocab: int) -> None:
    rows = requests * steps
    x, norm, weight = make(rows, 4096), make(4096), make(vocab, 4096, scale=4096**-0.5)
    offsets = torch.randint(0, 50, (vocab,), device="cuda")
    drafts = torch.full((requests, steps + 1), -7, device="cuda")
    head = ops.Head(norm, 1e-5, weight)
    ops.draft_from_hidden(x, head, ops.Drafts(drafts[:, :steps]))
    picked = drafts[:, :steps].reshape(rows, 1)
    logits = ops.norm_linear.reference(x.double(), ops.Norm(norm.double(), 1e-5), ops.Weight(weight.double()))
    # x is rounded after its norm, which moves a logit of size 4 by less than 0.05.
    assert bool((logits.gather(1, picked)[:, 0] >= logits.amax(1) - 0.05).all())
    assert bool((drafts[:, steps] == -7).all())
    mapped = torch.empty_like(drafts)[:, :steps]
    ops.draft_from_hidden(x, head, ops.Drafts(mapped, offsets))
    assert torch.equal(mapped, drafts[:, :steps] + offsets[drafts[:, :steps]])


@pytest.mark.parametrize("vocab", [5, 4096, 4097, 32000, 128256])
def test_draft_greedy_takes_the_first_of_equals(vocab: int) -> None:
    logits = make(6, vocab).round()
    logits[1] = 0
    logits[2] = float("-inf")
    logits[2, vocab - 1] = -1e30
    step = torch.tensor([0], device="cuda")
    token_ids, result = torch.empty(6, dtype=torch.int64, device="cuda"), torch.zeros(6, 1, dtype=torch.int64).cuda()
    ops.draft_from_logits(logits, ops.Drafts(result, None, step, token_ids))
    best = logits.amax(1, keepdim=True)
    first = torch.where(logits == best, torch.arange(vocab, device="cuda"), vocab).amin(1)
    assert torch.equal(token_ids, first)


def test_a_row_of_nan_still_gives_a_token_that_exists() -> None:
    logits = make(3, 5000)
    logits[1] = float("nan")
    step, result = torch.tensor([0], device="cuda"), torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    token_ids, offsets = torch.empty(3, dtype=torch.int64, device="cuda"), torch.zeros(5000, dtype=torch.int64).cuda()
    drafts = ops.Drafts(result, offsets, step, token_ids)
    ops.draft_from_logits(logits, drafts)
    assert token_ids[1] == 0
    weight = make(5000, 512)
    x = torch.full((3, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    ops.draft_from_hidden(x, ops.Head(None, 0.0, weight), drafts)
    assert token_ids.tolist() == [0, 0, 0]


def draws(rows: int) -> tuple[Tensor, Tensor]:
    """Temperatures, every third one 0, and seeds."""
    temperature = torch.rand(rows, device="cuda") + 0.3
    temperature[::3] = 0
    return temperature, torch.randint(-(2**62), 2**62, (rows,), device="cuda")


def check_draws(
    ids: Tensor, probs: Tensor, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, atol: float
) -> None:
    """The distributions are softmax(logits / temperature), and each token is the one that the noise picks from them."""
    sampling = temperature > 0
    want = torch.softmax(logits.double() / temperature.double()[:, None], -1)
    torch.testing.assert_close(probs[sampling].double(), want[sampling], atol=atol, rtol=20 * atol)
    keys = (probs.cpu().double().log() + gumbel(seeds.cpu(), positions.cpu(), DRAFT, logits.shape[1]).double()).cuda()
    picked = keys.gather(1, ids[:, None])[:, 0]
    assert bool((picked >= keys.amax(1) - 1e-4)[sampling].all())  # as good as equal keys may fall either way
    assert torch.equal(probs[~sampling], torch.nn.functional.one_hot(ids, logits.shape[1]).float()[~sampling])
    best = logits.double().gather(1, ids[:, None])[:, 0]
    assert bool((best >= logits.double().amax(1) - 2500 * atol)[~sampling].all())


@pytest.mark.parametrize("rows", [1, 5, 64, 80])
@pytest.mark.parametrize("vocab", [7, 4096, 4097, 32000, 128256])
def test_draft_gumbel(rows: int, vocab: int) -> None:
    logits, (temperature, seeds) = make(rows, vocab, scale=3.0), draws(rows)
    offsets, seq_lens = torch.randint(0, 50, (vocab,), device="cuda"), torch.randint(0, 5000, (rows,)).int().cuda()
    step, token_ids = torch.tensor([2], device="cuda"), torch.full((rows,), -7, device="cuda")
    drafts, probs = torch.full((rows, 4), -7, device="cuda"), torch.full((rows, 4, vocab), -7.0, device="cuda")
    how = ops.Draws(temperature, seeds, seq_lens, None, probs)
    ops.draft_from_logits(logits, ops.Drafts(drafts, None, step, token_ids), how)
    check_draws(token_ids, probs[:, 2], logits, temperature, seeds, seq_lens.long() + 1, 1e-6)
    assert torch.equal(drafts[:, 2], token_ids)
    assert bool((drafts[:, [0, 1, 3]] == -7).all())
    assert bool((probs[:, [0, 1, 3]] == -7).all())
    mapped = torch.empty_like(token_ids)
    ops.draft_from_logits(logits, ops.Drafts(drafts, offsets, step, mapped), how)
    assert torch.equal(mapped, token_ids + offsets[token_ids])


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 80])
@pytest.mark.parametrize("vocab", [32000, 500])
def test_gumbel_head(rows: int, vocab: int) -> None:
    x, norm, weight = make(rows, 4096), make(4096), make(vocab, 4096, scale=4096**-0.5)
    (temperature, seeds), seq_lens = draws(rows), torch.randint(0, 5000, (rows,)).int().cuda()
    step, token_ids = torch.tensor([1], device="cuda"), torch.full((rows,), -7, device="cuda")
    drafts, probs = torch.full((rows, 3), -7, device="cuda"), torch.full((rows, 3, vocab), -7.0, device="cuda")
    head, to = ops.Head(norm, 1e-5, weight), ops.Drafts(drafts, None, step, token_ids)
    how = ops.Draws(temperature, seeds, seq_lens, None, probs)
    ops.draft_from_hidden(x, head, to, how)
    logits = ops.norm_linear.reference(x.double(), ops.Norm(norm.double(), 1e-5), ops.Weight(weight.double()))
    check_draws(token_ids, probs[:, 1], logits, temperature, seeds, seq_lens.long() + 1, 4e-3)  # logits in bf16
    again, twice = torch.empty_like(token_ids), torch.empty_like(probs)
    ops.draft_from_hidden(x, head, to._replace(token_ids=again), how._replace(draft_probs=twice))
    assert torch.equal(again, token_ids)
    assert torch.equal(twice[:, 1], probs[:, 1])


@pytest.mark.parametrize(("requests", "steps", "vocab"), [(1, 15, 151936), (5, 3, 4096), (2, 2, 7)])
def test_draft_block_gumbel(requests: int, steps: int, vocab: int) -> None:
    logits, (temperature, seeds) = make(requests * steps, vocab, scale=3.0), draws(requests)
    starts, counts = torch.randint(0, 900, (requests,)).cuda(), torch.randint(0, 9, (requests,)).int().cuda()
    whole, probs = torch.full((requests, steps + 2), -7).cuda(), torch.zeros(requests, steps, vocab, device="cuda")
    how = ops.Draws(temperature, seeds, starts, counts, probs)
    ops.draft_from_logits(logits, ops.Drafts(whole[:, :steps]), how)
    positions = (starts + counts)[:, None] + 1 + torch.arange(steps, device="cuda")
    rows = (temperature.repeat_interleave(steps), seeds.repeat_interleave(steps), positions.flatten())
    check_draws(whole[:, :steps].flatten(), probs.flatten(0, 1), logits, *rows, 1e-6)
    assert bool((whole[:, steps:] == -7).all())


@pytest.mark.parametrize("mapped", [False, True])
def test_a_block_of_drafts(mapped: bool) -> None:
    for requests, steps, vocab in ((1, 15, 151936), (5, 3, 4096), (2, 2, 7)):
        logits = make(requests * steps, vocab).round()
        offsets = torch.randint(0, 50, (vocab,), device="cuda") if mapped else None
        whole = torch.full((requests, steps + 2), -7, device="cuda")
        ops.draft_from_logits(logits, ops.Drafts(whole[:, :steps], offsets))
        best = logits.amax(1, keepdim=True)
        first = torch.where(logits == best, torch.arange(vocab, device="cuda"), vocab).amin(1)
        wanted = first if offsets is None else first + offsets[first]
        assert torch.equal(whole[:, :steps].flatten(), wanted)
        assert bool((whole[:, steps:] == -7).all())

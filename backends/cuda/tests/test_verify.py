"""Accepting draft tokens on the device: the decisions of the plain torch reference.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, device, ops
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["device"]  # the fixture


def batch(requests: int, steps: int, vocab: int, draft_vocab: int | None, dtype: torch.dtype, seed: int = 0):
    """A verify of mixed temperatures, inert requests and missing drafts, on the CPU; every third draft is likely."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(requests * (steps + 1), vocab, generator=g) * 3).to(dtype)
    offsets = None
    if draft_vocab is not None:
        chosen = torch.randperm(vocab, generator=g)[:draft_vocab]  # in no order
        offsets = chosen - torch.arange(draft_vocab)
    q = torch.softmax(torch.randn(requests, steps, draft_vocab or vocab, generator=g) * 3, -1)
    drafts = (
        torch.multinomial(q.flatten(0, 1), 1, generator=g).view(requests, steps)
        if steps
        else q.new_empty(requests, 0).long()
    )
    if offsets is not None:
        drafts = drafts + offsets[drafts]
    best = logits.float().argmax(1).view(requests, -1)[:, :steps]
    drafts = torch.where(torch.rand(drafts.shape, generator=g) < 0.4, best, drafts)
    drafts = torch.where(torch.rand(drafts.shape, generator=g) < 0.1, -1, drafts)
    temperature = torch.rand(requests, generator=g) + 0.3
    temperature[::3] = 0
    seeds = torch.randint(-(2**62), 2**62, (requests,), generator=g)
    starts = torch.randint(0, 5000, (requests,), generator=g)
    starts[1::5] = -1
    return logits, drafts, q, offsets, temperature, seeds, starts


def outputs(requests: int, steps: int, device: str) -> decoder_ops.Sampled:
    counts = torch.full((requests,), -7, dtype=torch.int32, device=device)
    return decoder_ops.Sampled(torch.full((requests, steps + 1), -7, device=device), counts)


def run(
    logits: Tensor, drafts: Tensor, starts: Tensor, acceptance: decoder_ops.Acceptance
) -> list[decoder_ops.Sampled]:
    """The results of the op on the device and of its reference on the CPU."""
    got, want = (outputs(*drafts.shape, place) for place in (DEVICE, "cpu"))
    there = tree_map_only(Tensor, lambda t: t.to(DEVICE), (logits, drafts, starts, acceptance))
    ops().verify_drafts(*there, got)
    decoder_ops.verify_drafts.reference(logits, drafts, starts, acceptance, want)
    return [decoder_ops.Sampled(*(part.cpu() for part in got)), want]


SHAPES = [(1, 5, 5000, None), (8, 5, 5000, 700), (6, 3, 4096, 4096), (9, 0, 4097, None), (5, 1, 7, 3), (4, 15, 900, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize(("requests", "steps", "vocab", "draft_vocab"), SHAPES)
def test_verify_sampled(requests, steps, vocab, draft_vocab, with_probs, dtype) -> None:
    logits, drafts, q, offsets, temperature, seeds, starts = batch(requests, steps, vocab, draft_vocab, dtype)
    acceptance = decoder_ops.Acceptance(temperature, seeds, q if with_probs else None, offsets)
    (tokens, counts), (want, wanted) = run(logits, drafts, starts, acceptance)
    assert torch.equal(counts, wanted)
    assert torch.equal(tokens, want)


@pytest.mark.parametrize(("requests", "steps", "vocab", "draft_vocab"), SHAPES)
def test_verify_greedy_and_by_chance(requests, steps, vocab, draft_vocab) -> None:
    logits, drafts, _, _, _, seeds, starts = batch(requests, steps, vocab, draft_vocab, torch.bfloat16)
    chances = torch.linspace(0.9, 0.4, steps)
    for acceptance in (decoder_ops.Acceptance(), decoder_ops.Acceptance(seeds=seeds, chances=chances)):
        (tokens, counts), (want, wanted) = run(logits, drafts, starts, acceptance)
        assert torch.equal(counts, wanted)
        assert torch.equal(tokens, want)


def test_a_row_of_nan_still_gives_a_token_that_exists() -> None:
    logits, drafts, q, _, temperature, seeds, starts = batch(4, 2, 5000, None, torch.bfloat16)
    logits.fill_(float("nan"))
    temperature[:2] = torch.tensor([0.0, 1.0])
    (tokens, counts), _ = run(logits, drafts, starts.abs(), decoder_ops.Acceptance(temperature, seeds, q))
    assert counts.tolist() == [1] * 4
    assert tokens[:, 0].tolist() == [0] * 4


def test_the_residual_is_empty_where_the_drafter_is_the_target() -> None:
    """p equals q up to rounding: every draft token is accepted, whatever noise is drawn."""
    logits, _, _, _, temperature, seeds, starts = batch(16, 4, 300, None, torch.float32)
    temperature, starts = torch.full_like(temperature, 0.7), starts.abs()
    p = torch.softmax(logits / 0.7, -1).view(16, 5, 300)[:, :4].contiguous()
    drafts = p.argmax(-1)
    (tokens, counts), (want, _) = run(logits, drafts, starts, decoder_ops.Acceptance(temperature, seeds, p))
    assert int(counts.min()) >= 4  # u * q < p fails at most where u is next to 1
    assert torch.equal(tokens, want)

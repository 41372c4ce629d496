"""Rows of drawing, verifying and embedding over vocabularies of 9,000 to 262,144 tokens, or split over ranks."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph_models import ops as model_ops
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph_conformance.linear_oracles import EPS, first_of_largest
from specgraph_conformance.noise_oracles import DRAFT, RESAMPLE, number
from specgraph_conformance.op_rows.draws import best_of_ranks, drafts_for, draw, draws_for, expect_noise, large_seeds
from specgraph_conformance.op_rows.verify import verified
from specgraph_conformance.op_table import HALVES, Run, Table
from specgraph_conformance.rig import expect_close, expect_equal

TABLE = Table()
REQUESTS, K = 3, 2
BEST = torch.tensor([[69_999, 65_536, 17], [66_000, 3, 69_000], [65_535, 68_123, 67_001]])
"""The token that the logits of each row of each request put far above the others."""


@TABLE.row(
    "large-vocabulary",
    "Drafting, verifying, embedding and log-probabilities are exact for token ids above 65,535.",
    hazard="large-vocabulary",
    cause="a token id in 16 bits, a vocabulary cut at a fixed number of tiles, or their results merged wrongly",
)
def large_vocabulary(run: Run, g: torch.Generator) -> None:
    expect_exact(run, g, 70_000, BEST)
    expect_noise_of(run, g, (4_463, 69_999), 70_000)


def expect_noise_of(run: Run, g: torch.Generator, tokens: tuple[int, int], vocab: int) -> None:
    """Check that a draft and a sample of two equally likely tokens take the one with the smaller number of the
    noise."""
    requests = 24
    seeds, at = large_seeds(g, requests), torch.randint(1, 5000, (requests,), generator=g)
    warm, logits = torch.ones(requests), torch.full((requests, vocab), -1000.0)
    logits[:, tokens] = 0.0
    drafts = drafts_for(requests, 1, step=0)
    drafted = draw(run, (logits,), drafts, draws_for(drafts, vocab, warm, seeds, at.int()))[:, 0]
    none = torch.full((requests, 1), -1)
    sampled, _ = verified(run, logits.repeat_interleave(2, 0), none, at, decoder_ops.Acceptance(warm, seeds))
    for purpose, seen in ((DRAFT, drafted), (RESAMPLE, sampled[:, 0])):
        wanted = list[int]()
        for seed, place in zip(seeds.tolist(), at.tolist(), strict=True):
            rarest = {number(seed, place + 1, purpose, token): token for token in tokens}
            wanted.append(rarest[min(rarest)])
        expect_equal(seen, torch.tensor(wanted), f"tokens by the noise of {tokens}")


@TABLE.row(
    "vocabulary-of-262-thousand",
    "Drafting, verifying and log-probabilities are exact for token ids up to 262,143.",
    hazard="large-vocabulary",
    cause="a vocabulary cut at a fixed number of tiles, or their results merged wrongly",
    large=True,
)
def vocabulary_of_262_thousand(run: Run, g: torch.Generator) -> None:
    best = torch.tensor([[262_143, 131_072, 17], [199_000, 131_071, 262_142], [65_536, 151_935, 262_143]])
    expect_exact(run, g, 1 << 18, best)


def expect_exact(run: Run, g: torch.Generator, vocab: int, best: Tensor) -> None:
    """Check that drawing and verifying find `best`, the token that the logits of each row put far above the others."""
    logits = torch.randn(REQUESTS * (K + 1), vocab, generator=g)
    logits[torch.arange(len(logits)), best.flatten()] = 60.0  # far above what noise can change
    first, block = (logits.view(REQUESTS, K + 1, vocab)[:, 0].contiguous(),), (logits[: REQUESTS * K],)
    temperature, seeds, starts = torch.tensor([0.0, 0.8, 1.0]), torch.tensor([5, 6, 7]), torch.tensor([9, 10, 11])
    one, all_columns = drafts_for(REQUESTS, K, step=0), drafts_for(REQUESTS, K)
    of_one = draws_for(one, vocab, temperature, seeds, starts.int() - 1)
    of_block = draws_for(all_columns, vocab, temperature, seeds, starts, torch.tensor([1, 2, 1]).int())
    for draws, how in ((None, "the most likely"), (of_one, "drawn")):
        expect_equal(draw(run, first, one, draws)[:, 0], best[:, 0], f"tokens of a step, {how}")
    for draws, how in ((None, "the most likely"), (of_block, "drawn")):
        rows = best.flatten()[: REQUESTS * K].view(REQUESTS, K)
        expect_equal(draw(run, block, all_columns, draws), rows, f"tokens of a block, {how}")
    expect_equal(run(best_of_ranks, *first, 2), best[:, 0], "tokens of two ranks")
    drafts, wanted = best[:, :K].clone(), best.clone()
    drafts[1, 1] -= 1  # rejected
    wanted[1, 2] = -1
    for acceptance in (decoder_ops.Acceptance(), decoder_ops.Acceptance(temperature, seeds)):
        tokens, _ = verified(run, logits, drafts, starts, acceptance)
        expect_equal(tokens, wanted, "verified tokens")
    logprobs = torch.full((REQUESTS, K + 1), -7.0)
    run(decoder_ops.emitted_logprobs, logits, wanted, logprobs, written=[logprobs])
    exact = torch.log_softmax(logits.double(), -1).view(REQUESTS, K + 1, vocab).gather(2, best[..., None])[..., 0]
    exact[1, 2] = 0.0
    expect_close(logprobs, exact, 1e-4, "log-probabilities")


@TABLE.row(
    "large-vocabulary-heads",
    "The fused heads are exact for token ids above 65,535.",
    hazard="large-vocabulary",
    cause="draft_from_hidden: a token id in 16 bits, or a last tile that is left out",
)
def large_vocabulary_heads(run: Run, g: torch.Generator) -> None:
    size, vocab, best = 128, 70_000, BEST[:, 0]  # kernels of halves take multiples of 128 columns
    table = torch.randn(vocab, size, generator=g)
    x = table[best] * 40.0  # the logit of its own token is far above the others'
    drafts = drafts_for(REQUESTS, 1, step=0)
    lengths = torch.tensor([4, 5, 6], dtype=torch.int32)
    drawn = draws_for(drafts, vocab, torch.full((REQUESTS,), 0.9), torch.arange(REQUESTS), lengths)
    for dtype in (torch.float32, torch.bfloat16):
        source = x.to(dtype), ops.LmHead(None, EPS, table.to(dtype))
        for draws in (None, drawn):
            expect_equal(draw(run, source, drafts, draws)[:, 0], best, f"tokens of the head in {dtype}")


@TABLE.row(
    "logits-in-half",
    "Drafting and verifying from logits in half precision over 9,000 tokens take the lowest of equal ones, draw the "
    "token that the noise picks, and give float64's distributions.",
    hazard="large-vocabulary",
    cause="blocks of the vocabulary merged wrongly, the last of equals, or a softmax in the dtype of the logits",
    dtype=HALVES,
)
def logits_in_half(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    requests, vocab, k = 5, 9000, 2
    logits = (torch.randn(requests * (k + 1), vocab, generator=g) * 2).to(dtype)
    ties = logits.clone()
    for row in ties:
        row[torch.randperm(vocab, generator=g)[:4]] = 20.0
    best = first_of_largest(ties).view(requests, k + 1)
    offsets, seeds = torch.randint(0, 9, (vocab,), generator=g), large_seeds(g, requests)
    starts, counts = torch.arange(requests) * 31 + 3, (torch.arange(requests) % (k + 1) + 1).int()
    temperature = torch.full((requests,), 0.8)
    rows = ties.view(requests, k + 1, vocab)[:, :k].reshape(-1, vocab)
    tokens = draw(run, (rows,), drafts_for(requests, k, offsets))
    expect_equal(tokens, best[:, :k] + offsets[best[:, :k]], "greedy tokens of a block")
    drafts, wanted = best[:, :k].clone(), best.clone()
    drafts[1, 1] += 1  # rejected
    wanted[1, 2] = -1
    tokens, num_sampled = verified(run, ties, drafts, starts, decoder_ops.Acceptance())
    expect_equal(tokens, wanted, "tokens of a greedy verify")
    assert num_sampled.tolist() == [2 if r == 1 else k + 1 for r in range(requests)]
    tokens, num_sampled = verified(
        run, logits, torch.full_like(drafts, -1), starts, decoder_ops.Acceptance(temperature, seeds)
    )  # no draft tokens
    assert num_sampled.tolist() == [1] * requests
    expect_noise(tokens[:, :1], logits.view(requests, k + 1, vocab), seeds, starts + 1, RESAMPLE, temperature)
    shares = (logits.double() / 0.8).softmax(-1)
    block, step = drafts_for(requests, k), drafts_for(requests, k, step=1)
    draws = draws_for(block, vocab, temperature, seeds, starts, counts)
    tokens, own = draw(run, (logits[: requests * k],), block, draws), logits[: requests * k].view(requests, k, vocab)
    expect_close(draws.draft_probs, shares[: requests * k].view_as(own), 1e-5, "a block's shares")
    expect_noise(tokens, own, seeds, starts + counts + 1, DRAFT, temperature)
    draws = draws_for(step, vocab, temperature, seeds, starts.int())
    tokens = draw(run, (logits[:requests],), step, draws)
    expect_close(draws.draft_probs[:, 1], shares[:requests], 1e-5, "a step's shares")
    expect_noise(tokens, logits[:requests, None], seeds, starts + 1, DRAFT, temperature)


@TABLE.row(
    "embed-part",
    "The parts of an embedding that ranks look up add up to the rows of the whole one.",
    cause="embed_part: a token at the edge of a part, or a row of another rank that is not zero",
    quick=True,
)
def embed_part(run: Run, g: torch.Generator) -> None:
    ranks, part = 4, 25
    table, first = torch.randn(ranks * part, 48, generator=g), torch.arange(ranks) * part
    ids = torch.cat((torch.randint(0, ranks * part, (9,), generator=g), first, first + part - 1))
    parts = [run(model_ops.embed_part, ids, table[begin : begin + part], begin) for begin in first.tolist()]
    expect_equal(torch.stack(parts).sum(0), table[ids])

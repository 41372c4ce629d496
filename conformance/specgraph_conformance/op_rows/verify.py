"""Rows of the acceptance of drafts, greedy, by rejection sampling and by chance, against distributions and float64."""

from __future__ import annotations

from typing import Any

import torch
from specgraph import ops
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph_conformance.linear_oracles import EPS, first_of_largest
from specgraph_conformance.noise_oracles import ACCEPT, DRAFT, RESAMPLE, seed_that_draws
from specgraph_conformance.op_rows.draws import (
    SIZE,
    best_of_ranks,
    drafts_for,
    draw,
    draws_for,
    expect_noise,
    large_seeds,
    split_logits,
)
from specgraph_conformance.op_table import FLOATS, Run, Table, expect_reference
from specgraph_conformance.rig import expect_equal

TABLE = Table()


def verified(
    run: Run, logits: Tensor, drafts: Tensor, starts: Tensor, acceptance: decoder_ops.Acceptance
) -> tuple[Tensor, Tensor]:
    """Verify drafts, check the results, and return the sampled tokens, [R, K + 1], and their counts, [R]."""
    sampled = decoder_ops.Sampled(
        drafts.new_full((len(drafts), drafts.shape[1] + 1), -7), torch.full((len(drafts),), -7).int()
    )
    given = logits, drafts, starts, acceptance, sampled
    expect_reference(
        run, decoder_ops.verify_drafts, *given, written=sampled, tolerance=1.0, rare=int(len(drafts) > 1000)
    )
    return sampled.token_ids, sampled.num_sampled


@TABLE.row(
    "verify-greedy",
    "Draft tokens are accepted while they are the target's most likely ones; the target's own follows, then -1.",
    cause="verify_drafts: an accepted count off by one, or an inert request that samples",
    quick=True,
)
def verify_greedy(run: Run, g: torch.Generator) -> None:
    k, vocab = 3, 50
    logits = torch.randn(5 * (k + 1), vocab, generator=g)
    best = logits.argmax(-1).view(5, k + 1)
    drafts = best[:, :k].clone()
    drafts[1, 1] = (drafts[1, 1] + 1) % vocab
    drafts[2, 0] = (drafts[2, 0] + 1) % vocab
    drafts[3, 2] = -1
    _, counts = verified(run, logits, drafts, torch.tensor([5, 6, 7, 8, -1]), decoder_ops.Acceptance())
    assert counts.tolist() == [4, 2, 1, 3, 0]
    nothing = torch.zeros(20, 0, dtype=torch.int64)
    verified(run, logits, nothing, torch.arange(20), decoder_ops.Acceptance())


@TABLE.row(
    "many-drafts-verified",
    "Of 9 and of 20 drafts per request as many are accepted as the target agrees with, from none to all, greedily, "
    "sampled and synthetically.",
    hazard="drafts-past-a-number",
    cause="verify_drafts: drafts past a fixed number, or rows past a tile",
    k=[9, 20],
)
def many_drafts(run: Run, g: torch.Generator, k: int) -> None:
    requests, vocab = k + 1, 40
    logits = torch.randn(requests * (k + 1), vocab, generator=g)
    best = torch.randint(0, vocab, (requests, k + 1), generator=g)
    logits[torch.arange(len(logits)), best.flatten()] = 60.0  # far above what noise can change
    drafts = best[:, :k].clone()
    for r in range(k):  # request r accepts r drafts, the last one all of them
        drafts[r, r] = (drafts[r, r] + 1) % vocab
    each, warm, evenly = torch.arange(requests), torch.ones(requests), torch.full((requests, k, vocab), 1 / vocab)
    for acceptance in (
        decoder_ops.Acceptance(),
        decoder_ops.Acceptance(warm, each * 3),
        decoder_ops.Acceptance(warm, each * 3, evenly),
    ):
        _, counts = verified(run, logits, drafts, each * 7, acceptance)
        assert counts.tolist() == list(range(1, requests + 1))
    _, counts = verified(run, logits, drafts, each * 7, decoder_ops.Acceptance(seeds=each * 3, chances=torch.ones(k)))
    assert counts.tolist() == [k + 1] * requests, "with chances of 1"


@TABLE.row(
    "verify-mixed",
    "In one batch of requests at temperatures 0, 0.5, 0.8, 1 and 2, with and without draft tokens, some inert, each "
    "draft is accepted, or replaced by the token, as float64 decides with the noise of its position.",
    hazard="mixed-requests-in-verify",
    cause="verify_drafts: one request's temperature for all, -1 taken for token 0, missing draft probabilities, draft "
    "ids that are not mapped to the target's, or noise of another purpose or position",
    kind=["distribution", "draft-vocabulary", "one-token"],
)
@TABLE.row(
    "verify-decides-as-float64",
    "The same from logits in half precision: probabilities are not rounded to their dtype.",
    hazard="verify-rounds-probabilities",
    cause="verify_drafts: probabilities rounded to the dtype of the logits",
    dtype={"bf16": torch.bfloat16},
    requests=[4000],
    large=True,
)
def verify_mixed(
    run: Run,
    g: torch.Generator,
    kind: str = "distribution",
    dtype: torch.dtype = torch.float32,
    requests: int = 1200,
) -> None:
    temperatures, k, vocab = torch.tensor([0.0, 0.5, 2.0, 0.8, 1.0]), 2, 6  # five kinds of requests
    group = torch.arange(requests) % len(temperatures)
    logits = (torch.randn(requests, k + 1, vocab, generator=g) * 1.5).to(dtype)
    is_mapped = kind == "draft-vocabulary"
    ids = torch.tensor([1, 2, 4]) if is_mapped else torch.arange(vocab)
    q = (logits[:, :k, ids].float() + torch.randn(requests, k, len(ids), generator=g) * 0.5).softmax(-1)
    if kind == "one-token":  # the drafter is certain, and hands no distribution over
        q = torch.nn.functional.one_hot(q.argmax(-1), vocab).float()
    drafts = ids[torch.multinomial(q.flatten(0, 1), 1, generator=g)[:, 0]].view(requests, k)
    starts, seeds = torch.randint(0, 3000, (requests,), generator=g), large_seeds(g, requests)
    drafts[group == 3] = -1
    starts[group == 4] = -1
    acceptance = decoder_ops.Acceptance(
        temperatures[group],
        seeds,
        None if kind == "one-token" else q,
        ids - torch.arange(len(ids)) if is_mapped else None,
    )
    verified(run, logits.flatten(0, 1), drafts, starts, acceptance)


@TABLE.row(
    "verify-synthetic",
    "Draft token i is accepted with the given chance if those before it are; requests that are inert or have no draft "
    "token are as in a greedy verify.",
    hazard="synthetic-acceptance",
    cause="verify_drafts: the chances of the wrong column, or -1 accepted",
)
def verify_synthetic(run: Run, g: torch.Generator) -> None:
    requests, k, vocab = 300, 3, 20
    logits = torch.randn(requests * (k + 1), vocab, generator=g)
    drafts, seeds = torch.randint(0, vocab, (requests, k), generator=g), large_seeds(g, requests)
    drafts[1::5, 1] = -1
    starts, chances = torch.arange(requests) % 100, torch.tensor([0.8, 0.5, 1.0])
    starts[2::5] = -1
    verified(run, logits, drafts, starts, decoder_ops.Acceptance(seeds=seeds, chances=chances))


@TABLE.row(
    "unlikely-tokens",
    "Tokens of probability e^-25 are drafted, sampled and accepted where the noise of seed and position is that rare.",
    hazard="unlikely-tokens",
    cause="noise of few bits, or log(1 - number) of a number that 1 is not changed by, so that tokens far below the "
    "best are drawn too seldom; an acceptance that is decided by the difference or quotient of rounded numbers",
    kind=["drafted", "drafted-by-head", "sampled", "accepted"],
)
def unlikely_tokens(run: Run, g: torch.Generator, kind: str) -> None:
    requests, vocab, below, token = 100, 500, 25.0, 3
    purpose, index = {"sampled": (RESAMPLE, token), "accepted": (ACCEPT, 0)}.get(kind, (DRAFT, token))
    # From 1/32 to 32 times the probability of the token.
    exponents = 63 - below / 0.6931 + 10 * torch.rand(requests, generator=g) - 5
    numbers, starts = [int(2**e) | 1 for e in exponents.tolist()], torch.randint(0, 1 << 20, (requests,), generator=g)
    seeds = [seed_that_draws(n, at + 1, purpose, index) for n, at in zip(numbers, starts.tolist(), strict=True)]
    seeds, warm, row = torch.tensor(seeds), torch.ones(requests), torch.full((vocab,), -1000.0)
    row[[0, token]] = torch.tensor([0.0, -below])
    logits = row.expand(requests, 1, vocab)
    if kind.startswith("drafted"):
        first = torch.eye(1, SIZE, dtype=torch.bfloat16)
        head = first.expand(requests, SIZE).contiguous(), ops.LmHead(None, EPS, row[:, None].bfloat16() * first)
        drafts = drafts_for(requests, 1, step=0)
        source = head if kind == "drafted-by-head" else (logits[:, 0].contiguous(),)
        tokens = draw(run, source, drafts, draws_for(drafts, vocab, warm, seeds, starts.int()))
    else:
        drafts = torch.full((requests, 1), token if kind == "accepted" else -1)
        both = logits.repeat_interleave(2, 0).flatten(0, 1)
        tokens = verified(run, both, drafts, starts, decoder_ops.Acceptance(warm, seeds))[0][:, :1]
    if kind == "accepted":
        uniform = torch.tensor([number / 2**63 for number in numbers], dtype=torch.float64)
        ratio = uniform / row.double().softmax(-1)[token]
        wrong = ((tokens[:, 0] == token) != (ratio < 1)) & ((ratio - 1).abs() > 1e-5)
        assert not wrong.any(), f"accepted wrongly, or not, at {ratio[wrong].tolist()} times the token's probability"
    else:
        assert expect_noise(tokens, logits, seeds, starts + 1, purpose, warm) > requests // 2
    chosen = int((tokens == token).sum())
    assert requests // 5 < chosen < requests - requests // 5, f"{chosen} of {requests} tokens are the unlikely one"


@TABLE.row(
    "largest-noise",
    "The largest numbers of the noise are below 1: a token that has the whole probability is drafted, sampled and "
    "accepted at them too.",
    hazard="uniform-noise-of-one",
    cause="noise of 24 bits and more that is rounded to 1: its logarithm is infinite, and an excluded token is drawn, "
    "or a draft of probability 1 is rejected",
    kind=["drafted", "sampled", "accepted"],
)
def largest_noise(run: Run, g: torch.Generator, kind: str) -> None:
    requests, vocab, token = 20, 40, 3
    purpose, index = {"sampled": (RESAMPLE, token), "accepted": (ACCEPT, 0)}.get(kind, (DRAFT, token))
    numbers = [(1 << 63) - 1 - (each << 33) for each in range(requests)]  # nearer to 1 than to the float32 below it
    starts = torch.randint(0, 1 << 20, (requests,), generator=g)
    seeds = [seed_that_draws(n, at + 1, purpose, index) for n, at in zip(numbers, starts.tolist(), strict=True)]
    seeds, warm, logits = torch.tensor(seeds), torch.ones(requests), torch.full((requests, vocab), -1000.0)
    logits[:, token] = 0.0
    if kind == "drafted":
        drafts = drafts_for(requests, 1, step=0)
        tokens = draw(run, (logits,), drafts, draws_for(drafts, vocab, warm, seeds, starts.int()))
    else:
        drafts = torch.full((requests, 1), token if kind == "accepted" else -1)
        both = logits.repeat_interleave(2, 0)
        tokens, counts = verified(run, both, drafts, starts, decoder_ops.Acceptance(warm, seeds))
        assert counts.tolist() == [2 if kind == "accepted" else 1] * requests, f"counts {counts.tolist()}"
        tokens = tokens[:, :1]
    expect_equal(tokens, torch.full((requests, 1), token), "the only possible token")


@TABLE.row(
    "verify-best",
    "Drafts are accepted while they are the best of all ranks' best tokens; inert requests give none.",
    cause="accept_greedy: rows of another request, or an inert request that is counted",
    quick=True,
)
def verify_best(run: Run, g: torch.Generator) -> None:
    k, accepted, starts = 3, [3, 0, 2, 1, 2], torch.tensor([4, 0, 7, -1, 2])
    logits, best = split_logits(g, 5 * (k + 1), torch.float32)
    rows = best.view(5, k + 1)
    taken = torch.arange(k) < torch.tensor(accepted)[:, None]
    sampled = decoder_ops.Sampled(torch.full((5, k + 1), -7), torch.full((5,), -7, dtype=torch.int32))

    def accept(logits: Tensor, *rest: Any) -> None:
        decoder_ops.accept_greedy(best_of_ranks(logits), *rest)

    run(accept, logits, torch.where(taken, rows[:, :k], 399 - rows[:, :k]), starts, sampled, written=sampled)
    wanted = [
        [*row[: n + 1], *[-1] * (k - n)] if start >= 0 else [-1] * (k + 1)
        for row, n, start in zip(rows.tolist(), accepted, starts, strict=True)
    ]
    assert sampled.token_ids.tolist() == wanted
    assert sampled.num_sampled.tolist() == [4, 1, 3, 0, 3]


@TABLE.row(
    "ties-in-a-verify",
    "Of equally likely tokens the lowest id is the target's and the drafter's own, in every op that takes a maximum.",
    cause="a maximum over tiles, or by a reduction, that takes the last of equals: target and drafter disagree",
    quick=True,
    dtype=FLOATS,
)
def ties_in_a_verify(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    requests, k = 5, 3
    logits = torch.randint(-20, 20, (requests * (k + 1), 1500), generator=g).to(dtype)  # maxima occur several times
    best, each = first_of_largest(logits).view(requests, k + 1), torch.arange(requests)
    for name, acceptance in (
        ("greedily", decoder_ops.Acceptance()),
        ("at 0", decoder_ops.Acceptance(torch.zeros(requests), each)),
    ):
        tokens, _ = verified(run, logits, best[:, :k].clone(), each, acceptance)
        expect_equal(tokens, best, f"tokens verified {name}")
    expect_equal(draw(run, (logits,), drafts_for(requests, k + 1)), best, "tokens of a block")

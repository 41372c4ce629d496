"""Rows of the ops that draw draft tokens: exact tokens where greedy, distributions by chi-square where drawn."""

from __future__ import annotations

from typing import Any

import torch
from specgraph import ops
from torch import Tensor

from specgraph_conformance.linear_oracles import (
    EPS,
    first_of_largest,
    head_of_ties,
    norm_of,
    normal,
    normed,
    small_integers,
    uneven,
)
from specgraph_conformance.noise_oracles import DRAFT, RESAMPLE, TEMPERATURE, drawn
from specgraph_conformance.op_table import FLOATS, HALVES, Run, Table
from specgraph_conformance.oracles import expect_shares
from specgraph_conformance.rig import expect_close, expect_equal

TABLE = Table()
MAPPED = {"same-vocabulary": False, "own-vocabulary": True}
SIZE = 512
"""Input columns of heads for which devices have kernels of their own."""


def drafts_for(requests: int, steps: int, draft_to_target: Tensor | None = None, step: int | None = None) -> ops.Drafts:
    """Return where a chain's step, or a block without one, writes its tokens."""
    ids = torch.full((requests, steps), -7)
    if step is None:
        return ops.Drafts(ids, draft_to_target)
    return ops.Drafts(ids, draft_to_target, torch.tensor([step]), torch.full((requests,), -7))


def draws_for(
    drafts: ops.Drafts, vocab: int, temperature: Tensor, seeds: Tensor, positions: Tensor, more: Tensor | None = None
) -> ops.Draws:
    """Draws that write distributions of `vocab` tokens."""
    probs = torch.full((*drafts.draft_token_ids.shape, vocab), -7.0)
    return ops.Draws(temperature, seeds, positions, more, probs)


def draw(run: Run, source: tuple[Any, ...], drafts: ops.Drafts, draws: ops.Draws | None = None) -> Tensor:
    """Draw from logits, or from hidden states and a head; return the written tokens [R, rows per request]."""
    columns = slice(None) if drafts.draft_step is None else slice(int(drafts.draft_step), int(drafts.draft_step) + 1)
    tokens, written = drafts.draft_token_ids[:, columns], [drafts.draft_token_ids[:, columns]]
    written += [] if draws is None else [draws.draft_probs[:, columns]]
    written += [] if drafts.token_ids is None else [drafts.token_ids]
    run(ops.draft_from_logits if len(source) == 1 else ops.draft_from_hidden, *source, drafts, draws, written=written)
    if drafts.token_ids is not None:
        expect_equal(drafts.token_ids, tokens[:, 0], "the next step's tokens")
    return tokens


@TABLE.row(
    "draft-greedy",
    "The most likely token, mapped to the target's ids, goes to the next step and to its own column only.",
    hazard="draft-step-column",
    cause="draft_from_logits: the column index, or the vocabulary map applied twice or not at all",
    quick=True,
    kind=MAPPED,
)
def draft_greedy(run: Run, g: torch.Generator, kind: bool) -> None:
    logits = torch.randn(5, 1000, generator=g)
    logits[1, 17] = logits[1, 400] = 50.0  # a tie: the first index wins
    drafts = drafts_for(5, 3, torch.arange(1000) * 2 if kind else None, step=1)
    best = first_of_largest(logits)[:, None]
    expect_equal(draw(run, (logits,), drafts), 3 * best if kind else best, "the draft tokens")


@TABLE.row(
    "draft-block-greedy",
    "The most likely token of each masked row, mapped to the target's ids, has the row's place in the draft tokens.",
    hazard="parallel-block-sampling",
    cause="draft_from_logits: rows and columns exchanged, or the vocabulary map not applied",
    quick=True,
    kind=MAPPED,
)
def draft_block_greedy(run: Run, g: torch.Generator, kind: bool) -> None:
    logits = torch.randn(9 * 4, 500, generator=g)
    tokens = draw(run, (logits,), drafts_for(9, 4, torch.arange(500) if kind else None))
    best = first_of_largest(logits).view(9, 4)
    expect_equal(tokens, best * 2 if kind else best, "the draft tokens")


TEMPERATURES = torch.tensor([0.0, 0.5, 2.0])
"""The temperatures of the three kinds of request that alternate in a batch."""
DRAWS = 3000
KIND = torch.arange(3 * DRAWS) % 3


def expect_drawn(tokens: Tensor, probs: Tensor, logits: Tensor, tolerance: float) -> None:
    """Tokens [R, n] and distributions [R, n, vocab] of requests of all kinds are those of logits [kinds, n, vocab]."""
    best = logits[0].argmax(-1)
    expect_equal(tokens[KIND == 0], best.expand(DRAWS, -1), "the draft tokens at temperature 0")
    one_hot = torch.nn.functional.one_hot(best, logits.shape[-1]).float()
    expect_equal(probs[KIND == 0], one_hot.expand(DRAWS, -1, -1), "the distributions at temperature 0")
    for number in (1, 2):
        at = f"at temperature {TEMPERATURES[number]:g}"
        wanted = (logits[number].double() / TEMPERATURES[number].double()).softmax(-1)
        expect_close(probs[number == KIND], wanted.expand(DRAWS, -1, -1), tolerance, f"the distribution {at}")
        for step, shares in enumerate(wanted):
            expect_shares(tokens[number == KIND][:, step], shares, f"draft token {step} {at}")


def expect_gumbel(run: Run, g: torch.Generator, k: int, vocab: int, step: int | None) -> Tensor:
    """Draw k tokens per request, of kinds in turns, in a chain's step or in a block; return them."""
    requests = len(KIND)
    logits, each = torch.randn(3, k, vocab, generator=g) * 0.6, torch.arange(requests)
    drafts = drafts_for(requests, k, step=step)
    counts = torch.full((requests,), 2, dtype=torch.int32) if step is None else None
    at = each % 50 if step is None else (each % 50).int()
    draws = draws_for(drafts, vocab, TEMPERATURES[KIND], each * 7919, at, counts)
    tokens = draw(run, (logits[KIND].view(-1, vocab),), drafts, draws)
    expect_drawn(tokens, draws.draft_probs, logits, 1e-5)
    return tokens


@TABLE.row(
    "draft-gumbel",
    "Sampled tokens follow softmax(logits / temperature) at each request's own temperature, and the distribution "
    "written is that one.",
    hazard="gumbel-seed-position",
    cause="draft_from_logits: noise that isn't Gumbel, or a temperature applied after it",
)
def draft_gumbel(run: Run, g: torch.Generator) -> None:
    expect_gumbel(run, g, 1, 5, step=0)


@TABLE.row(
    "draft-block-gumbel",
    "Tokens of masked rows follow softmax(logits / temperature) at each request's own temperature, and the "
    "distributions written are those.",
    hazard="parallel-block-sampling",
    cause="draft_from_logits: the temperature left out of the distribution, or one request's temperature for all",
)
def draft_block_gumbel(run: Run, g: torch.Generator) -> None:
    tokens = expect_gumbel(run, g, 2, 5, step=None)
    assert not torch.equal(tokens[KIND == 2][:, 0], tokens[KIND == 2][:, 1]), "both rows of a block drew one noise"


@TABLE.row(
    "gumbel-head",
    "The fused norm, output projection and sampling write the distribution of float64's logits at each request's own "
    "temperature, and tokens that follow it.",
    hazard="fused-sampling",
    cause="draft_from_hidden: the norm or the temperature left out, one request's noise for all, or the column index",
)
def gumbel_head(run: Run, g: torch.Generator) -> None:
    requests, size, vocab = len(KIND), 32, 5
    x, norm = torch.randn(3, size, generator=g), 1 + torch.randn(size, generator=g) / 4
    weight, each = torch.randn(vocab, size, generator=g) * 0.12, torch.arange(requests)
    drafts = drafts_for(requests, 3, torch.arange(vocab), step=1)
    draws = draws_for(drafts, vocab, TEMPERATURES[KIND], each * 7919, (each % 50 + 1).int())
    tokens = draw(run, (x[KIND], ops.Head(norm, EPS, weight)), drafts, draws)
    logits = (normed(x, norm) @ weight.double().T)[:, None]
    assert (tokens % 2 == 0).all(), "the vocabulary map was not applied"
    expect_drawn(tokens // 2, draws.draft_probs[:, 1:2], logits, 1e-4)


@TABLE.row(
    "greedy-head",
    "The fused norm, output projection and argmax write float64's most likely token, mapped to the target's ids, into "
    "their own column.",
    hazard="draft-step-column",
    cause="draft_from_hidden: the norm left out, the column index, or the vocabulary map",
    quick=True,
)
def greedy_head(run: Run, g: torch.Generator) -> None:
    x, norm, weight = normal(g, (9, 64)), norm_of(g, 64), normal(g, (300, 64))
    tokens = draw(run, (x, ops.Head(norm, EPS, weight)), drafts_for(9, 4, torch.arange(300), step=2))
    expect_equal(tokens[:, 0], (normed(x, norm) @ weight.double().T).argmax(-1) * 2, "the draft tokens")


def expect_first_of_twins(
    run: Run, g: torch.Generator, dtype: torch.dtype, rows: int, every: int, shape: tuple[int, int], step: int | None
) -> None:
    """Heads of 3,000 tokens take the lower of two equally likely ones, with and without a norm."""
    vocab, x, norm = 3000, small_integers(g, (rows, SIZE)), norm_of(g, SIZE, dtype)
    weight = head_of_ties(g, x, vocab, every)
    for scale, what in ((None, "without"), (norm, "with")):
        drafts = drafts_for(*shape, torch.arange(vocab) * 2, step)
        if step is None:  # a part of a wider tensor
            drafts = drafts._replace(draft_token_ids=torch.full((shape[0], shape[1] + 2), -7)[:, : shape[1]])
        tokens = draw(run, (x.to(dtype), ops.Head(scale, EPS, weight.to(dtype))), drafts)
        logits = ((normed(x, scale) @ weight.double().T) * 1e6).round()  # twins are equal in any order of the sums
        expect_equal(tokens.flatten(), first_of_largest(logits) * 3, f"the tokens {what} a norm")


@TABLE.row(
    "greedy-head-in-tiles",
    "With 512 input columns and 3,000 tokens in half precision the fused head takes the lowest of the most likely "
    "tokens, with and without a norm, as the target's id.",
    hazard="heads-in-tiles",
    cause="draft_from_hidden: blocks of the vocabulary merged wrongly, the last of equals, the norm left out, or a row "
    "past the tile",
    large=True,
    dtype=HALVES,
    rows=[1, 16, 24, 64],
)
def greedy_head_in_tiles(run: Run, g: torch.Generator, dtype: torch.dtype, rows: int) -> None:
    expect_first_of_twins(run, g, dtype, rows, 1, (rows, 3), 1)


@TABLE.row(
    "greedy-block-head",
    "With 512 input columns and 3,000 tokens in half precision the fused head of a block takes the lowest of the most "
    "likely tokens of each row, with and without a norm, as the target's id, and writes no other column.",
    hazard="heads-in-tiles",
    cause="draft_from_hidden: rows and columns exchanged, blocks of the vocabulary merged wrongly, the last of equals, "
    "the norm left out, or the vocabulary map not applied",
    dtype=HALVES,
    block={"1-3": (1, 3), "5-7": (5, 7), "10-7": (10, 7)},
)
def greedy_block_head(run: Run, g: torch.Generator, dtype: torch.dtype, block: tuple[int, int]) -> None:
    expect_first_of_twins(run, g, dtype, block[0] * block[1], 2, block, None)


@TABLE.row(
    "gumbel-head-in-tiles",
    "With 512 input columns in half precision the fused head draws the token that the noise of its request's seed and "
    "position picks, from the distribution that it writes.",
    hazard="heads-in-tiles",
    cause="draft_from_hidden: noise of another block of the vocabulary or of another row, or a softmax over a part of "
    "it",
    large=True,
    dtype=HALVES,
    rows=[1, 20, 40],
)
def gumbel_head_in_tiles(run: Run, g: torch.Generator, dtype: torch.dtype, rows: int) -> None:
    vocab, x, norm = 300, uneven(g, rows, SIZE, dtype), norm_of(g, SIZE, dtype)
    weight = normal(g, (vocab, SIZE), dtype, 2 * SIZE**-0.5)
    seeds, lengths = large_seeds(g, rows), (torch.arange(rows) * 37 + 5).int()
    drafts = drafts_for(rows, 2, step=1)
    draws = draws_for(drafts, vocab, torch.full((rows,), TEMPERATURE), seeds, lengths)
    tokens = draw(run, (x, ops.Head(norm, EPS, weight)), drafts, draws)
    logits = normed(x, norm) @ weight.double().T
    expect_close(draws.draft_probs[:, 1], (logits / TEMPERATURE).softmax(-1), 0.02, "the distributions")
    # Where a token hardly leads, the rounding of a logit may decide.
    compared = expect_noise(tokens, logits[:, None], seeds, lengths + 1, DRAFT, 0.15)
    assert compared >= rows // 2


@TABLE.row(
    "heads-of-many-requests",
    "For 133 requests the fused projections take the lowest id among equal logits, and write the distribution of "
    "float64's logits with the norm's own eps.",
    hazard="linears-of-many-rows",
    cause="draft_from_hidden: rows past a tile, a baked eps, or a maximum that takes the last of equals",
)
def heads_of_many_requests(run: Run, g: torch.Generator) -> None:
    rows, size = 133, 32
    # Small integers: every sum is exact in float32, so that equal logits are equal in every order of the sums.
    x, weight = small_integers(g, (rows, size)), small_integers(g, (350, size))
    weight = torch.cat((weight, weight.flip(0)))  # every logit twice
    tokens = draw(run, (x, ops.Head(None, EPS, weight)), drafts_for(rows, 2, step=1))
    expect_equal(tokens[:, 0], first_of_largest(x.double() @ weight.double().T), "the tokens of equal logits")
    x, norm = uneven(g, rows, size, torch.float32), 1 + normal(g, (size,)) / 4
    weight, drafts = normal(g, (9, size), scale=0.3), drafts_for(rows, 2, step=1)
    each = torch.arange(rows)
    draws = draws_for(drafts, 9, torch.full((rows,), 0.7), each, each.int() + 1)
    draw(run, (x, ops.Head(norm, EPS, weight)), drafts, draws)
    wanted = ((normed(x, norm) @ weight.double().T) / 0.7).softmax(-1)
    expect_close(draws.draft_probs[:, 1], wanted, 1e-4, "the distributions of the fused sampling")


def large_seeds(g: torch.Generator, requests: int) -> Tensor:
    """Seeds of 63 bits, of both signs."""
    return torch.randint(-(1 << 62), 1 << 62, (requests,), generator=g)


def expect_noise(
    tokens: Tensor, logits: Tensor, seeds: Tensor, first: Tensor, purpose: int, least: float = 1e-3
) -> int:
    """Tokens [R, n] are those that the noise of seeds [R] and positions from first [R] on picks from logits [R, n,
    vocab], where they lead by `least`, so that rounding does not decide; return how many were compared."""
    wrong, compared = list[str](), 0
    for r, row in enumerate(tokens.tolist()):
        for j, token in enumerate(row):
            wanted, lead = drawn(logits[r, j].double(), int(seeds[r]), int(first[r]) + j, purpose)
            compared += lead > least
            if token != wanted and lead > least:
                wrong.append(f"the first at row {j} of request {r}: {token} instead of {wanted}")
    assert not wrong, (
        f"{len(wrong)} of {tokens.numel()} tokens are not those that the noise of seed and position picks, {wrong[0]}"
    )
    return compared


@TABLE.row(
    "noise-of-the-position",
    "A sampled token is the one that the noise of its request's seed and its own absolute position picks, the same on "
    "every device.",
    hazard="noise-of-another-position",
    cause="the position that this op takes its noise at, the purpose of the noise, or the hash in 64-bit arithmetic",
    kind=["draft_gumbel", "gumbel_head", "draft_block_gumbel", "verify_sampled"],
)
def noise_of_the_position(run: Run, g: torch.Generator, kind: str) -> None:
    requests, vocab = 40, 7
    logits, seeds = torch.randn(requests, 3, vocab, generator=g), large_seeds(g, requests)
    at, temperature = torch.randint(1, 5000, (requests,), generator=g), torch.full((requests,), TEMPERATURE)
    if kind == "verify_sampled":  # without draft tokens, the row at the last token's position decides the one after it
        sampled = ops.Sampled(torch.full((requests, 3), -7), torch.full((requests,), -7, dtype=torch.int32))
        rows, none = logits.flatten(0, 1), torch.full((requests, 2), -1)
        run(ops.verify_drafts, rows, none, at, ops.Acceptance(temperature, seeds), sampled, written=sampled)
        expect_noise(sampled.token_ids[:, :1], logits, seeds, at + 1, RESAMPLE)
        return
    block = kind == "draft_block_gumbel"
    drafts = drafts_for(requests, 3) if block else drafts_for(requests, 1, torch.zeros(requests).long(), step=0)
    counts = (torch.arange(requests) % 3 + 1).int() if block else None
    draws = draws_for(drafts, vocab, temperature, seeds, at if block else at.int(), counts)
    source: tuple[Any, ...] = (logits.flatten(0, 1) if block else logits[:, 0].contiguous(),)
    if kind == "gumbel_head":  # a norm that changes nothing, and a projection whose columns are the logits
        norm = torch.full((requests,), requests**-0.5)  # the rms of a row of eye is n ** -0.5
        source = torch.eye(requests), ops.Head(norm, 0.0, logits[:, 0].T.contiguous())
    tokens = draw(run, source, drafts, draws)
    expect_noise(tokens, logits, seeds, at + 1 if counts is None else at + counts + 1, DRAFT)


def split_logits(g: torch.Generator, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [rows, 400] of four ranks with ties, zeros of both signs and only negative rows; and each row's best."""
    logits = torch.randn(rows, 400, generator=g).to(dtype)
    logits[0, 150] = logits[0, 350] = 60.0  # a tie of two ranks: the smaller id wins
    logits[1] = -logits[1].abs() - 1
    logits[2] = -logits[2].abs() - 1
    logits[2, 210], logits[2, 320] = -0.0, 0.0  # equal
    return logits, first_of_largest(logits.double())


def best_of_ranks(logits: Tensor) -> Tensor:
    """The most likely tokens by what four ranks gather of each other's best tokens."""
    part = logits.shape[1] // 4
    parts = [logits[:, rank * part : (rank + 1) * part].contiguous() for rank in range(4)]
    return ops.best_of(torch.stack([ops.best_tokens(each, rank * part) for rank, each in enumerate(parts)]))


@TABLE.row(
    "draft-best",
    "The best of each rank's best tokens is the first most likely token of the whole vocabulary.",
    hazard="draft-step-column",
    cause="best_tokens: the order of negative logits, of zeros or of ties; write_drafts: the column, or the vocabulary",
    quick=True,
    kind={"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16},
)
def draft_best(run: Run, g: torch.Generator, kind: torch.dtype) -> None:
    logits, best = split_logits(g, 6, kind)
    ids, columns = torch.full((6,), -7), torch.full((6, 3), -7)
    drafts = ops.Drafts(columns, torch.arange(400) * 2, torch.tensor([1]), ids)

    def draw_best(logits: Tensor, drafts: ops.Drafts) -> None:
        ops.write_drafts(best_of_ranks(logits), drafts)

    run(draw_best, logits, drafts, written=(ids, columns[:, 1]))
    expect_equal(ids, 3 * best, "the next step's tokens")
    expect_equal(columns[:, 1], 3 * best, "the draft tokens")


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
    sampled = ops.Sampled(torch.full((5, k + 1), -7), torch.full((5,), -7, dtype=torch.int32))

    def accept(logits: Tensor, *rest: Any) -> None:
        ops.accept_greedy(best_of_ranks(logits), *rest)

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
    logits = torch.randint(-20, 20, (requests * (k + 1), 1500), generator=g).to(dtype)  # each maximum several times
    best, each = first_of_largest(logits).view(requests, k + 1), torch.arange(requests)
    for name, acceptance in (("greedily", ops.Acceptance()), ("at 0", ops.Acceptance(torch.zeros(requests), each))):
        sampled = ops.Sampled(torch.full((requests, k + 1), -7), torch.full((requests,), -7, dtype=torch.int32))
        run(ops.verify_drafts, logits, best[:, :k].clone(), each, acceptance, sampled, written=sampled)
        expect_equal(sampled.token_ids, best, f"tokens verified {name}")
    expect_equal(draw(run, (logits,), drafts_for(requests, k + 1)), best, "tokens of a block")

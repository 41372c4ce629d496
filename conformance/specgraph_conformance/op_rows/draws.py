"""Rows of the ops that draw draft tokens. Greedy tokens must be exact; sampled ones must be those that the noise
picks."""

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
from specgraph_conformance.noise_oracles import DRAFT, drawn
from specgraph_conformance.op_table import HALVES, Run, Table
from specgraph_conformance.rig import expect_close, expect_equal

TABLE = Table()
TEMPERATURES = torch.tensor([0.0, 0.5, 0.8, 2.0])
"""The temperatures, which requests take in turns."""
SIZE = 512
"""The input columns of heads. Devices have kernels of their own for this number."""


def drafts_for(requests: int, steps: int, draft_to_target: Tensor | None = None, step: int | None = None) -> ops.Drafts:
    """Return the tensors that a chain's draft step writes its tokens to. If `step` is None, a block writes them."""
    ids = torch.full((requests, steps), -7)
    if step is None:
        return ops.Drafts(ids, draft_to_target)
    return ops.Drafts(ids, draft_to_target, torch.tensor([step]), torch.full((requests,), -7))


def draws_for(
    drafts: ops.Drafts, vocab: int, temperature: Tensor, seeds: Tensor, positions: Tensor, more: Tensor | None = None
) -> ops.Draws:
    """Return draws that write distributions over `vocab` tokens."""
    probs = torch.full((*drafts.draft_token_ids.shape, vocab), -7.0)
    return ops.Draws(temperature, seeds, positions, more, probs)


def draw(run: Run, source: tuple[Any, ...], drafts: ops.Drafts, draws: ops.Draws | None = None) -> Tensor:
    """Draw from logits, or from hidden states and a head. Return the written tokens, [R, rows per request]."""
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
    kind={"same-vocabulary": (1, False), "own-vocabulary": (1, True)},
)
@TABLE.row(
    "draft-block-greedy",
    "The most likely token of each masked row, mapped to the target's ids, has the row's place in the draft tokens.",
    hazard="parallel-block-sampling",
    cause="draft_from_logits: rows and columns exchanged, or the vocabulary map not applied",
    quick=True,
    kind={"same-vocabulary": (None, False), "own-vocabulary": (None, True)},
)
def draft_greedy(run: Run, g: torch.Generator, kind: tuple[int | None, bool]) -> None:
    step, is_mapped = kind
    drafts = drafts_for(9, 4, torch.arange(1000) * 2 if is_mapped else None, step)
    logits = torch.randn(9 * drafts.rows, 1000, generator=g)
    logits[1, 17] = logits[1, 400] = 50.0  # a tie: the first index wins
    best = first_of_largest(logits).view(9, -1)
    expect_equal(draw(run, (logits,), drafts), 3 * best if is_mapped else best, "the draft tokens")


@TABLE.row(
    "draft-gumbel",
    "At each request's own temperature a draft token is the one that the noise of its request's seed and its own "
    "absolute position picks, the same on every device, and the distribution written is softmax(logits / temperature).",
    hazard="gumbel-seed-position",
    cause="draft_from_logits: the position that the noise is taken at, its purpose, its hash in 64-bit arithmetic, or "
    "a temperature applied after it",
    kind=["step"],
)
@TABLE.row(
    "draft-block-gumbel",
    "At each request's own temperature the tokens of masked rows are those that the noise of their positions picks, "
    "and the distributions written are softmax(logits / temperature).",
    hazard="parallel-block-sampling",
    cause="draft_from_logits: the temperature left out of the distribution, or one row's noise for all",
    kind=["block"],
)
@TABLE.row(
    "gumbel-head",
    "The fused norm, output projection and sampling draw the tokens that the noise picks at each request's own "
    "temperature, and write the distributions of float64's logits.",
    hazard="fused-sampling",
    cause="draft_from_hidden: the norm or the temperature left out, one request's noise for all, or rows past a tile",
    kind=["head"],
)
def sampled(run: Run, g: torch.Generator, kind: str) -> None:
    if kind == "head":
        expect_sampled_head(run, g, torch.float32, 133, 32, 1e-4, 1e-3)
        return
    logits = torch.randn(133, 3 if kind == "block" else 1, 7, generator=g)
    expect_sampled(run, g, (logits.flatten(0, 1),), logits, None if kind == "block" else 1, 1e-5, 1e-3)


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
    # If a token hardly leads, the rounding of a logit may decide.
    expect_sampled_head(run, g, dtype, rows, SIZE, 0.02, 0.15)


def expect_sampled_head(
    run: Run, g: torch.Generator, dtype: torch.dtype, rows: int, size: int, tolerance: float, least: float
) -> None:
    """Check the tokens that a fused head with a vocabulary of 300 samples; see `expect_sampled`."""
    x, norm = uneven(g, rows, size, dtype), norm_of(g, size, dtype)
    weight = normal(g, (300, size), dtype, 2 * size**-0.5)
    logits = (normed(x, norm) @ weight.double().T)[:, None]
    expect_sampled(run, g, (x, ops.LmHead(norm, EPS, weight)), logits, 1, tolerance, least)


def expect_sampled(
    run: Run, g: torch.Generator, source: tuple[Any, ...], logits: Tensor, step: int | None, tolerance: float,
    least: float,
) -> None:  # fmt: skip
    """Sample from a source, and check tokens and distributions against its logits, [R, n, vocab].

    Args:
        step: the column of a chain's draft step. None for a block.
        tolerance: of the distributions.
        least: tokens that lead by less are not compared, as rounding may decide about them.
    """
    requests, rows, vocab = logits.shape
    each, seeds = torch.arange(requests), large_seeds(g, requests)
    temperature = TEMPERATURES[(each + 2) % len(TEMPERATURES)]
    at, counts = torch.randint(1, 5000, (requests,), generator=g), (each % 3 + 1).int() if step is None else None
    drafts = drafts_for(requests, rows if step is None else 3, torch.arange(vocab), step)
    draws = draws_for(drafts, vocab, temperature, seeds, at if step is None else at.int(), counts)
    tokens = draw(run, source, drafts, draws)
    assert (tokens % 2 == 0).all(), "the vocabulary map was not applied"
    tokens = tokens // 2
    first = at + 1 if counts is None else at + 1 + counts
    compared = expect_noise(tokens, logits, seeds, first, DRAFT, temperature, least)
    assert compared >= tokens.numel() // 2
    probs = draws.draft_probs if step is None else draws.draft_probs[:, step : step + 1]
    wanted = (logits.double() / temperature.where(temperature > 0, 1.0).double()[:, None, None]).softmax(-1)
    one_hot = torch.nn.functional.one_hot(tokens, vocab).double()
    wanted = wanted.where((temperature > 0)[:, None, None], one_hot)
    expect_close(probs, wanted, tolerance, "the distributions")


def large_seeds(g: torch.Generator, requests: int) -> Tensor:
    """Return random seeds of 63 bits, of both signs."""
    return torch.randint(-(1 << 62), 1 << 62, (requests,), generator=g)


def expect_noise(
    tokens: Tensor, logits: Tensor, seeds: Tensor, first: Tensor, purpose: int, temperature: Tensor, least: float = 1e-3
) -> int:
    """Check that the noise picks these tokens, and return the number of tokens compared.

    Only tokens that lead by `least` are compared, as rounding may decide about the others.

    Args:
        tokens: [R, n].
        logits: [R, n, vocab].
        seeds: [R].
        first: [R], the position of each request's first token.
    """
    wrong, compared = list[str](), 0
    for r, row in enumerate(tokens.tolist()):
        for j, token in enumerate(row):
            wanted, lead = drawn(logits[r, j], int(seeds[r]), int(first[r]) + j, purpose, float(temperature[r]))
            compared += lead > least
            if token != wanted and lead > least:
                wrong.append(f"the first at row {j} of request {r}: {token} instead of {wanted}")
    assert not wrong, (
        f"{len(wrong)} of {tokens.numel()} tokens are not those that the noise of seed and position picks, {wrong[0]}"
    )
    return compared


@TABLE.row(
    "greedy-head",
    "The fused norm, output projection and argmax write float64's most likely token, mapped to the target's ids, into "
    "their own column.",
    hazard="draft-step-column",
    cause="draft_from_hidden: the norm left out, the column index, the vocabulary map, or rows past a tile",
    quick=True,
    rows=[9, 133],
)
def greedy_head(run: Run, g: torch.Generator, rows: int) -> None:
    x, norm, weight = normal(g, (rows, 64)), norm_of(g, 64), normal(g, (300, 64))
    tokens = draw(run, (x, ops.LmHead(norm, EPS, weight)), drafts_for(rows, 4, torch.arange(300), step=2))
    expect_equal(tokens[:, 0], (normed(x, norm) @ weight.double().T).argmax(-1) * 2, "the draft tokens")


def expect_first_of_twins(
    run: Run, g: torch.Generator, dtype: torch.dtype, rows: int, every: int, shape: tuple[int, int], step: int | None
) -> None:
    """Check that heads with a vocabulary of 3,000 take the lower of two equally likely tokens, with and without a
    norm."""
    vocab, x, norm = 3000, small_integers(g, (rows, SIZE)), norm_of(g, SIZE, dtype)
    weight = head_of_ties(g, x, vocab, every)
    for scale, what in ((None, "without"), (norm, "with")):
        drafts = drafts_for(*shape, torch.arange(vocab) * 2, step)
        if step is None:  # a part of a wider tensor
            drafts = drafts._replace(draft_token_ids=torch.full((shape[0], shape[1] + 2), -7)[:, : shape[1]])
        tokens = draw(run, (x.to(dtype), ops.LmHead(scale, EPS, weight.to(dtype))), drafts)
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


def split_logits(g: torch.Generator, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits [rows, 400] of four ranks, and each row's best token. They have ties, zeros of both signs, and rows
    of negative values only."""
    logits = torch.randn(rows, 400, generator=g).to(dtype)
    logits[0, 150] = logits[0, 350] = 60.0  # a tie of two ranks: the smaller id wins
    logits[1] = -logits[1].abs() - 1
    logits[2] = -logits[2].abs() - 1
    logits[2, 210], logits[2, 320] = -0.0, 0.0  # equal
    return logits, first_of_largest(logits.double())


def best_of_ranks(logits: Tensor, ranks: int = 4) -> Tensor:
    """Return the most likely tokens as ranks find them: each rank's best tokens, gathered."""
    part = logits.shape[1] // ranks
    parts = [logits[:, rank * part : (rank + 1) * part].contiguous() for rank in range(ranks)]
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

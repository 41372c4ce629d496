"""Rows of the op between two greedy draft steps, which writes the token, the next position and the next step's
input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specgraph import ops

from specgraph_conformance.linear_oracles import TOLERANCE, head_of_ties, small_integers
from specgraph_conformance.op_table import Run, Table, expect_reference

TABLE = Table()
LIMIT, BLOCK, EPS = 48, 16, 0.03
LENGTHS = [15, 16, 47, 0, 1, 31, 32, 46, 48]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the head's input, of the vocabulary, and of the next draft step's embedding and hidden state."""

    dtype: torch.dtype
    head: int
    vocab: int
    embedding: int
    hidden: int
    every: int = 1
    """The argument `every` of `head_of_ties`."""


@TABLE.row(
    "greedy-next-step",
    "Three steps in a row write the lowest of the most likely tokens as target ids into the columns of the steps, move "
    "live requests one place further, and give the normed embedding and hidden state of the next step.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="greedy_next_step: the embedding of the token before, the column of the next step, a draft id that is not "
    "mapped, a maximum that takes the last of equals, or places of other requests",
    requests=[1, 9, 81],
)
def next_step(run: Run, g: torch.Generator, requests: int) -> None:
    expect_steps(run, g, requests, Sizes(torch.float32, 32, 90, 24, 40))


@TABLE.row(
    "greedy-next-step-in-tiles",
    "In bfloat16, with 512 input columns and 3,000 tokens, three steps in a row write the lowest of the most likely "
    "tokens, move live requests one place further, and give the normed input of the next step.",
    hazard="heads-in-tiles",
    cause="greedy_next_step: blocks of the vocabulary merged wrongly, the last of equals, or parts of another request",
    requests=[1, 16, 40, 64],
)
def in_tiles(run: Run, g: torch.Generator, requests: int) -> None:
    """Check sizes that a device's own kernel of the head takes: half precision, and input columns that tiles divide."""
    expect_steps(run, g, requests, Sizes(torch.bfloat16, 512, 3000, 256, 512))


@TABLE.row(
    "greedy-next-step-of-many",
    "In bfloat16, with 1,024 input columns and 9,000 or 17,000 tokens, a step of 40 or 70 requests writes the lowest "
    "of the most likely tokens, moves live requests one place further, and gives the next step's input.",
    hazard="heads-in-tiles",
    cause="greedy_next_step: a kernel for many rows or tokens: its tiles merged wrongly, or those past the last token",
    large=True,
    batch={"9000-40": (9000, 40), "17000-70": (17000, 70)},
)
def of_many(run: Run, g: torch.Generator, batch: tuple[int, int]) -> None:
    vocab, requests = batch
    expect_steps(run, g, requests, Sizes(torch.bfloat16, 1024, vocab, 256, 512, every=2), steps=1)


def expect_steps(run: Run, g: torch.Generator, requests: int, sizes: Sizes, steps: int = 3) -> None:
    """Call the op for one draft step after the other, each from the results of the one before."""
    dtype, vocab = sizes.dtype, sizes.vocab
    lengths = (LENGTHS * 17)[:requests]
    inputs = [small_integers(g, (requests, sizes.head)) for _ in range(steps)]
    weight = head_of_ties(g, torch.cat(inputs), vocab, sizes.every).to(dtype)
    offsets = torch.randint(0, 7, (vocab,), generator=g)
    table = torch.randn(vocab + 7, sizes.embedding, generator=g).to(dtype)
    norms = [torch.randn(n, generator=g).to(dtype) for n in (sizes.embedding, sizes.hidden)]
    blocks = [[3 * r + 1, 3 * r + 2, 3 * r + 3 if r % 2 else 0] for r in range(requests)]
    block_table, seq_lens = (torch.tensor(rows, dtype=torch.int32) for rows in (blocks, lengths))
    positions, slots, ids = (torch.full((requests,), -77) for _ in range(3))
    step, drafts = torch.zeros(1, dtype=torch.int64), torch.full((requests, 4), -77)
    to = ops.Drafts(drafts, offsets, step, ids)
    written = seq_lens, positions, slots, step, ids, drafts
    for number, x in enumerate(inputs):
        hidden = (torch.randn(requests, sizes.hidden, generator=g) * (0.1, 1.0, 20.0)[number]).to(dtype)
        places = seq_lens, positions, slots, block_table, LIMIT, BLOCK
        pair_input = ops.PairInput(table, norms[0], norms[1], EPS)
        given = x.to(dtype), ops.LmHead(None, 0.0, weight), to, *places, hidden, pair_input
        tolerance = 1e-4 if dtype == torch.float32 else TOLERANCE[dtype]
        expect_reference(run, ops.greedy_next_step, *given, written=written, tolerance=tolerance)

"""Rows of the ops of block drafters: convolutions inside blocks, candidates, and the state after drawn tokens."""

from __future__ import annotations

import torch
from specgraph.ops import Drafts, Norm, Weight
from specgraph_models import ops as model_ops
from torch import Generator, Tensor

from specgraph_conformance.linear_oracles import EPS, TOLERANCE, expect_magnitudes, norm_of, normal, uneven
from specgraph_conformance.op_table import FLOATS, Run, Table, expect_reference
from specgraph_conformance.rig import expect_equal

TABLE = Table()
MORE_FLOATS = {**FLOATS, "fp16": torch.float16}


@TABLE.row(
    "convolutions-in-blocks",
    "Convolutions inside blocks, alone and with the residual sum and the norm after them, are within rounding of "
    "float64; no row sees another block.",
    hazard="fused-linears",
    cause="convolve_blocks or convolve_and_norm: a tap of the block before, a number of another group of channels, a "
    "tap taken from the row after, or the residual or the norm left out",
    dtype=MORE_FLOATS,
    taps=[1, 2, 4],
)
def convolutions(run: Run, g: Generator, dtype: torch.dtype, taps: int) -> None:
    for blocks, rows, size, groups in ((3, 5, 96, 6), (4, 1, 40, 40), (2, 16, 64, 1)):
        x, residual = (uneven(g, blocks * rows, size, dtype) for _ in range(2))
        base, norm = normal(g, (taps, size), dtype), norm_of(g, size, dtype)
        part = normal(g, (len(x), 2 * taps * groups), dtype)[:, taps * groups :]  # rows of a wider projection
        given, both = (x, base, part, rows), (residual, Norm(norm, EPS))
        expect_reference(run, model_ops.convolve_blocks, *given, tolerance=TOLERANCE[dtype])
        expect_reference(run, model_ops.convolve_and_norm, *given, *both, tolerance=TOLERANCE[dtype])


@TABLE.row(
    "top-logits",
    "The largest logits of each row are those of a stable sort, in its order, with columns that hold them, also where "
    "many are equal or none is finite.",
    hazard="node-ties-differ",
    cause="top_logits: parts of a row merged wrongly, a column twice, or one past the vocabulary",
    dtype=MORE_FLOATS,
    vocab=[5, 300, 9000],
)
def top_logits(run: Run, g: Generator, dtype: torch.dtype, vocab: int) -> None:
    logits = normal(g, (5, vocab), dtype)
    logits[1], logits[2] = (logits[1] * 2).round(), 0.0
    logits[3, 4:] = float("-inf")
    logits[4] = torch.arange(vocab).to(dtype)  # the largest ones are side by side
    for count in (1, 5, 16):
        if count > vocab:
            continue
        values, ids = run(model_ops.top_logits, logits, count)
        expect_equal(values, logits.sort(dim=1, descending=True, stable=True).values[:, :count], "the logits")
        expect_equal(logits.gather(1, ids), values, "the logits at the columns")
        assert all(len(set(row)) == count for row in ids.tolist()), "a column is there twice"


@TABLE.row(
    "draws-from-shortlists",
    "The drawn candidate is the best by its logit and its product with the token before; of equals it has the lowest "
    "draft id, and its target id is written.",
    hazard="node-ties-differ",
    cause="draft_from_shortlist: the place in the list in place of the id, a factor of another request, the token "
    "before as a draft id, or the first candidate of equals",
    dtype=MORE_FLOATS,
    rows=[1, 9],
)
def draws_from_shortlists(run: Run, g: Generator, dtype: torch.dtype, rows: int) -> None:
    def integers(*shape: int) -> Tensor:  # which no sum rounds, so that many scores are equal
        return torch.randint(-2, 3, shape, generator=g).to(dtype)

    vocab, drafted = 50, 30
    for count, rank in ((5, 8), (16, 24), (1, 16)):
        ids = torch.stack([torch.randperm(drafted, generator=g)[:count] for _ in range(rows)])
        before = torch.randint(0, vocab, (rows, 3), generator=g)[:, 1]
        tables = integers(vocab, rank), integers(drafted, rank)
        shortlist = model_ops.Shortlist(ids, integers(rows, count), integers(rows, rank), *tables, before)
        for offsets in (None, torch.randint(0, vocab - drafted, (drafted,), generator=g)):
            tokens = torch.full((rows, 3), -7)
            drafts = Drafts(tokens[:, 1:2], offsets)
            expect_reference(run, model_ops.draft_from_shortlist, shortlist, drafts, written=[drafts.draft_token_ids])


@TABLE.row(
    "recurrent-state",
    "The state after a token, and silu of a product plus rows that were computed before, are within rounding of "
    "float64's gated recurrent unit, in sizes with and without kernels.",
    hazard="fused-linears",
    cause="next_state or silu_of_sum: gates exchanged, the reset gate on the wrong product, a row of another request "
    "or token, or a part of longer rows read as if it were whole",
    dtype=MORE_FLOATS,
    rows=[1, 8, 33],
)
def recurrent_state(run: Run, g: Generator, dtype: torch.dtype, rows: int) -> None:
    for state_size, size in ((24, 40), (256, 512)):
        table, state = normal(g, (60, size), dtype), normal(g, (rows, state_size), dtype, 0.5)
        taken, kept = (normal(g, (3 * state_size, n), dtype, n**-0.5) for n in (size, state_size))
        ids = torch.randint(0, 60, (rows, 4), generator=g)[:, 2]
        given = ids, table, state, Weight(taken), Weight(kept)
        expect_reference(run, model_ops.next_state, *given, tolerance=TOLERANCE[dtype])
        weight, added = normal(g, (40, size + state_size), dtype, state_size**-0.5), uneven(g, rows, 40, dtype)
        total = state.double() @ weight.double()[:, size:].T + added.double()
        seen = run(model_ops.silu_of_sum, state, weight[:, size:], added)
        expect_magnitudes(seen, total * torch.sigmoid(total), "silu of the sum")

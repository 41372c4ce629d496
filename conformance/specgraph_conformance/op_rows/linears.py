"""Rows of the linears: norms, projections, gates and greedy heads, against float64."""

from __future__ import annotations

import torch
from specgraph import ops

from specgraph_conformance.linear_oracles import EPS, TOLERANCE, gated, norm_of, normal, normed
from specgraph_conformance.op_table import Run, Table
from specgraph_conformance.rig import expect_close, expect_equal

TABLE = Table()
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@TABLE.row(
    "norm-gate-up",
    "A norm, a projection and the gate of an MLP are within rounding of float64.",
    hazard="fused-linears",
    cause="norm_gate_up: gate and up exchanged, the bias or the norm left out, or sums in the narrow type",
    dtype=FLOATS,
)
def norm_gate_up(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    x, norm = normal(g, (9, 128), dtype), norm_of(g, 128, dtype)
    weight, bias = normal(g, (2 * 96, 128), dtype, 1 / 11), normal(g, (2 * 96,), dtype)
    seen = run(ops.norm_gate_up, x, norm, EPS, weight, bias)
    wanted = gated(normed(x, norm) @ weight.double().T + bias.double())
    expect_close(seen, wanted, 2 * TOLERANCE[dtype], "norm_gate_up")


@TABLE.row(
    "pair-linear",
    "The first linear of a draft head, over the normed embedding and hidden state, is within rounding of float64.",
    hazard="fused-linears",
    cause="pair_linear: embedding and hidden state exchanged, a norm or the bias left out, or sums in the narrow type",
    dtype=FLOATS,
)
def pair_linear(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    ids, table, hidden = (
        torch.tensor([0, 49, 3, 3, 17, 8, 30, 2, 41]),
        normal(g, (50, 64), dtype),
        normal(g, (9, 96), dtype),
    )
    norms = [norm_of(g, n, dtype) for n in (64, 96)]
    weight, bias = normal(g, (80, 160), dtype, 1 / 12), normal(g, (80,), dtype)
    seen = run(ops.pair_linear, ids, table, norms[0], hidden, norms[1], EPS, weight, bias)
    both = torch.cat((normed(table[ids], norms[0]), normed(hidden, norms[1])), dim=-1)
    expect_close(seen, both @ weight.double().T + bias.double(), TOLERANCE[dtype], "pair_linear")


@TABLE.row(
    "greedy-head",
    "The fused norm, output projection and argmax write float64's most likely token, mapped to the target's ids, into "
    "their own column.",
    hazard="draft-step-column",
    cause="greedy_head: the norm left out, the column index, or the vocabulary map",
    quick=True,
)
def greedy_head(run: Run, g: torch.Generator) -> None:
    requests, vocab = 9, 300
    x, norm, weight = normal(g, (requests, 64)), norm_of(g, 64), normal(g, (vocab, 64))
    ids, drafts = torch.full((requests,), -7), torch.full((requests, 4), -7)
    offsets, step = torch.arange(vocab), torch.tensor([2])
    run(ops.greedy_head, x, norm, EPS, weight, offsets, step, ids, drafts, written=(ids, drafts[:, 2]))
    wanted = (normed(x, norm) @ weight.double().T).argmax(-1) * 2
    expect_equal(ids, wanted, "the next step's tokens")
    expect_equal(drafts[:, 2], wanted, "the draft tokens")

"""Rows of models that are split over ranks: each rank's part by the op, the whole on the host."""

from __future__ import annotations

import torch
from specgraph import ops
from torch import Generator

from specgraph_conformance.op_table import Run, Table
from specgraph_conformance.rig import expect_equal

TABLE = Table()


@TABLE.row(
    "embed-part",
    "The parts of an embedding that ranks look up add up to the rows of the whole one.",
    cause="embed_part: a token at the edge of a part, or a row of another rank that is not zero",
    quick=True,
)
def embed_part(run: Run, g: Generator) -> None:
    ranks, part = 4, 25
    table, first = torch.randn(ranks * part, 48, generator=g), torch.arange(ranks) * part
    ids = torch.cat((torch.randint(0, ranks * part, (9,), generator=g), first, first + part - 1))
    parts = [run(ops.embed_part, ids, table[begin : begin + part], begin) for begin in first.tolist()]
    expect_equal(torch.stack(parts).sum(0), table[ids])

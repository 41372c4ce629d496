"""Rows of ragged verifies, against Python's own sort."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph_run.decoder import ops as decoder_ops

from specgraph_conformance.op_table import Run, Table, expect_reference

TABLE = Table()
MAX_MODEL_LEN, BLOCK = 90, 16


@TABLE.row(
    "begin-ragged",
    "Rows of a ragged verify are each request's last token and its first drafts, as many as are among the likeliest "
    "of all live requests; every row is one request's, and drafts without a row are no drafts.",
    hazard="ragged-rows",
    cause="begin_ragged_rows: rows of one request counted to another, a draft before which one is left out, an inert "
    "request's drafts before a live one's, or a slot past max_model_len",
    quick=True,
    requests=[1, 5, 33],
    steps=[1, 4, 7],
)
def begin_ragged(run: Run, g: torch.Generator, requests: int, steps: int) -> None:
    for total in sorted({requests, requests + 1, requests + requests * steps // 2, requests * (steps + 1)}):
        expect_rows(run, g, requests, steps, total)


def expect_rows(run: Run, g: torch.Generator, requests: int, steps: int, total: int) -> None:
    """Run the op for a pass of `total` rows."""
    # Powers of two make products exact, and many of them equal.
    confidence = 0.5 ** torch.randint(0, 3, (requests, steps), generator=g).float()
    starts = torch.randint(0, MAX_MODEL_LEN, (requests,), generator=g)
    starts[1::4] = -1
    last = torch.randint(100, 200, (requests, 1), generator=g)
    drafts = torch.randint(200, 300, (requests, steps), generator=g)
    columns = -(-MAX_MODEL_LEN // BLOCK) + 1
    table = (torch.randperm(requests * columns, generator=g) + 1).view(requests, columns).int()
    lengths = torch.full((requests,), -77, dtype=torch.int32)
    rows = ops.Rows(torch.full((total,), -77), torch.full((total,), -77), lengths, torch.full((total,), -77))
    starts_of_rows = torch.full((requests + 1,), -77, dtype=torch.int32)
    ragged = decoder_ops.RaggedRows(confidence, starts_of_rows, torch.full((requests * (steps + 1),), -77))
    given = ops.RowInputs(starts, table, token_ids=last, draft_token_ids=drafts)
    written = [*(each for each in rows if each is not None), ragged.query_start_loc, ragged.columns, drafts]
    plan = ops.RowPlan(steps + 1, MAX_MODEL_LEN, BLOCK)
    expect_reference(run, decoder_ops.begin_ragged_rows, given, plan, rows, ragged, written=written)

"""Rows of ragged verifies, against Python's own sort."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph.attention import NULL_SLOT
from specgraph_run.decoder import ops as decoder_ops

from specgraph_conformance.op_table import Run, Table
from specgraph_conformance.rig import expect_equal

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
    """Run the op for a pass of `total` rows, and compare its rows with the ones that Python's sort gives."""
    # Powers of two make products exact, and many of them equal.
    confidence = 0.5 ** torch.randint(0, 3, (requests, steps), generator=g).float()
    starts = torch.randint(0, MAX_MODEL_LEN, (requests,), generator=g)
    starts[1::4] = -1
    last = torch.randint(100, 200, (requests,), generator=g)
    drafts = torch.randint(200, 300, (requests, steps), generator=g)
    columns = -(-MAX_MODEL_LEN // BLOCK) + 1
    table = (torch.randperm(requests * columns, generator=g) + 1).view(requests, columns).int()
    counts = split(confidence, starts, total - requests)
    rows = ops.Rows(*(torch.full((n,), -77, dtype=dtype) for n, dtype in (
        (total, torch.int64), (total, torch.int64), (requests, torch.int32), (total, torch.int64),
    )))  # fmt: skip
    ragged = decoder_ops.RaggedRows(
        confidence, torch.full((requests + 1,), -77, dtype=torch.int32), torch.full((requests * (steps + 1),), -77)
    )
    kept, plan = drafts.clone(), ops.RowPlan(steps + 1, MAX_MODEL_LEN, BLOCK)
    given = ops.RowInputs(starts, table, token_ids=last[:, None], draft_token_ids=kept)
    written = [*(each for each in rows if each is not None), ragged.query_start_loc, ragged.columns, kept]
    run(decoder_ops.begin_ragged_rows, given, plan, rows, ragged, written=written)
    begins, wanted, lines, begin = [0], list[tuple[int, int, int]](), list[int](), 0
    for r, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        for column, token in enumerate([int(last[r]), *drafts[r, :count].tolist()]):
            position = start + column
            inside = start >= 0 and position < MAX_MODEL_LEN
            slot = int(table[r, position // BLOCK]) * BLOCK + position % BLOCK if inside else NULL_SLOT
            wanted.append((token, min(position, MAX_MODEL_LEN - 1) if start >= 0 else 0, slot))
        lines += [begin + min(column, count) for column in range(steps + 1)]
        begin += count + 1
        begins.append(begin)
    tokens, positions, slots = (torch.tensor(values) for values in zip(*wanted, strict=True))
    lens = [start + count + 1 if start >= 0 else 0 for start, count in zip(starts.tolist(), counts, strict=True)]
    left = [
        [token if i < count else -1 for i, token in enumerate(row)]
        for row, count in zip(drafts.tolist(), counts, strict=True)
    ]
    for what, got, want in (
        ("tokens", rows.token_ids, tokens),
        ("positions", rows.positions, positions),
        ("slots", rows.slot_mapping, slots),
        ("lengths", rows.seq_lens, torch.tensor(lens).int()),
        ("first rows", ragged.query_start_loc, torch.tensor(begins).int()),
        ("rows of columns", ragged.columns, torch.tensor(lines)),
        ("drafts", kept, torch.tensor(left)),
    ):
        assert got is not None
        expect_equal(got, want, what)


def split(confidence: torch.Tensor, starts: torch.Tensor, num_drafts: int) -> list[int]:
    """Return the number of each request's drafts among the `num_drafts` likeliest of all."""
    chances = list[tuple[float, int, int]]()
    for r, (row, start) in enumerate(zip(confidence.tolist(), starts.tolist(), strict=True)):
        chance = 1.0
        for column, value in enumerate(row):
            chance *= value
            chances.append((-chance if start >= 0 else 1.0, column, r))
    chosen = [r for _, _, r in sorted(chances)[:num_drafts]]
    return [chosen.count(r) for r in range(len(starts))]

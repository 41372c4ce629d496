"""Rows of the ops that copy rows and batches, and of the op from a propose to the next verify."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph.ops.copies import BatchTensors
from specgraph_run.decoder import ops as decoder_ops

from specgraph_conformance.op_table import Run, Table, expect_reference

TABLE = Table()
REQUESTS = 19


def a_round(
    g: torch.Generator, n: int, query_len: int, aux_size: int, blocks: int, wider: tuple[int, int] = (0, 0)
) -> BatchTensors:
    """Return a random batch of n requests.

    Args:
        wider: the number of extra columns in the memory of the token tensor and of the hidden-state tensor.
    """
    tokens, hidden = wider
    return BatchTensors(
        torch.randint(0, 60, (n, query_len + tokens), generator=g)[:, :query_len],
        torch.randint(1, query_len + 1, (n,), generator=g).int(),
        torch.randint(0, 60, (n,), generator=g),
        torch.randn(n * query_len, aux_size + hidden, generator=g)[:, hidden // 2 : aux_size + hidden // 2],
        torch.randint(1, 60, (n, blocks), generator=g).int(),
    )


def expect_load(run: Run, given: BatchTensors, requests: int, blocks: int) -> None:
    """Load the batch over a larger one of `requests` requests with `blocks` blocks each, and check the result."""
    query_len = given.sampled_token_ids.shape[1]
    held = BatchTensors(
        torch.full((requests, query_len), 77),
        torch.full((requests,), 7, dtype=torch.int32),
        torch.full((requests,), 77),
        torch.full((requests * query_len, given.aux_hidden.shape[1]), 7.0),
        torch.full((requests, blocks), 77, dtype=torch.int32),
    )
    expect_reference(run, ops.load_batch, given, held, written=held)


@TABLE.row(
    "load-round",
    "A smaller round written over a larger one leaves nothing of it: later requests are inert, and block tables end in "
    "null blocks.",
    hazard="stale-block-table",
    cause="load_batch copies the new columns of the block table, or the new requests, and leaves the tail as it was",
    quick=True,
    wider={"whole": (0, 0), "columns": (2, 0)},
)
def load_batch(run: Run, g: torch.Generator, wider: tuple[int, int]) -> None:
    expect_load(run, a_round(g, 9, 3, 8, 4, wider), 11, 6)


@TABLE.row(
    "copies-of-wide-rows",
    "A round of 70 requests with 12,288 auxiliary values per row and 130 blocks each is loaded bit for bit; rows of "
    "that width, and of 77 values, are taken from and into parts of wider tensors.",
    hazard="wide-rows",
    cause="load_batch or take_rows: values past a chunk, rows counted by their width instead of their stride",
)
def wide(run: Run, g: torch.Generator) -> None:
    expect_load(run, a_round(g, 70, 2, 12_288, 130), 80, 300)
    expect_load(run, a_round(g, 3, 4, 77, 2, (0, 12)), 5, 40)
    rows = torch.tensor([16, 0, 3, 3, 9, 11, 1, 2, 15])
    for size in (12_288, 77):
        source = torch.randn(17, size + 40, generator=g).to(torch.bfloat16)
        out = torch.full((9, size + 8), -7.0, dtype=torch.bfloat16)
        expect_reference(run, ops.take_rows, source[:, 8 : size + 8], rows, out[:, :size], written=[out[:, :size]])


@TABLE.row(
    "take-rows",
    "take_rows copies the selected rows, or all rows without a selection, bit for bit.",
    cause="take_rows: rows counted from the wrong request, or the selection ignored",
)
def take_rows(run: Run, g: torch.Generator) -> None:
    source, rows = torch.randn(170, 24, generator=g), torch.randint(0, 170, (300,), generator=g)
    selected, copy = torch.zeros(300, 24), torch.zeros(170, 24)
    expect_reference(run, ops.take_rows, source, rows, selected, written=[selected])
    expect_reference(run, ops.take_rows, source, None, copy, written=[copy])


@TABLE.row(
    "next-verify",
    "The verify after a propose begins at the last sampled token with its drafts; inert requests stay inert.",
    cause="next_verify: the last token of another place, a position that is not moved on, or drafts of a wider buffer",
    quick=True,
    k=[0, 1, 5],
)
def next_verify(run: Run, g: torch.Generator, k: int) -> None:
    tokens = torch.randint(-1, 9, (REQUESTS, 4), generator=g)
    counts = torch.randint(0, 5, (REQUESTS,), generator=g).int()
    starts, wider = torch.randint(0, 500, (REQUESTS,), generator=g), torch.randint(0, 90, (REQUESTS, 7), generator=g)
    last, copied = torch.full((REQUESTS,), -77), torch.full((REQUESTS, k), -77)
    given = tokens, counts, wider[:, :k], starts, last, copied
    expect_reference(run, decoder_ops.next_verify, *given, written=(starts, last, copied))

"""Rows of the ops that begin a pass and that advance it by a draft step."""

from __future__ import annotations

from typing import Any

import torch
from specgraph import ops
from specgraph.attention import NULL_BLOCK, NULL_SLOT
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.past_rows import PastRows
from torch import Tensor

from specgraph_conformance.op_table import Run, Table, expect_reference
from specgraph_conformance.rig import expect_equal, slot_of

TABLE = Table()
LIMIT, BLOCK, MASK = 40, 16, 99
PLACES = ("positions", "slot_mapping", "seq_lens", "token_ids")
STEPS = ("last_rows", "step_positions", "step_seq_lens", "draft_step")
PAST_BLOCK = 4
PAST = {"one": 1, "three": 3, "more-than-a-block": 6}
"""The past rows per request, K - 1."""
PAST_BLOCKS = [
    [5, 2, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 12, 13, 0, 0, 0, 0, 0, 0, 0],
    [3, 4, 6, 14, 15, 16, 17, 18, 19, 20],
    [8, 7, 9, 0, 0, 0, 0, 0, 0, 0],
    [10, 11, 0, 0, 0, 0, 0, 0, 0, 0],
]
"""The KV blocks of each request. Request 0 has the null block at position 8, the last of its batch."""


def i32(*values: Any) -> Tensor:
    """Return an int32 tensor."""
    return torch.tensor(*values, dtype=torch.int32)


def a_round(g: torch.Generator, query_len: int) -> RowInputs:
    """Return a batch with inert requests between others. It reaches max_model_len, block ends and null blocks."""
    counts, starts = [query_len, 0, 1, min(2, query_len), 1], [14, 3, 39, 31, 0]
    blocks = [[5, 2, 0], [1, 0, 0], [3, 4, 6], [8, 7, 9], [10, 0, 0]]
    more = 4
    counts += torch.randint(0, query_len + 1, (more,), generator=g).tolist()
    starts += torch.randint(0, LIMIT, (more,), generator=g).tolist()
    blocks += (torch.randperm(20, generator=g)[: 3 * more].view(more, 3) + 11).tolist()
    tokens = torch.randint(0, 90, (len(counts), query_len), generator=g)
    return RowInputs(torch.tensor(starts), i32(blocks), i32(counts), tokens)


PER_REQUEST = ("seq_lens", "step_positions", "step_seq_lens")
LENGTHS = ("seq_lens", "step_seq_lens")


def expect_rows(
    run: Run, plan: RowPlan, given: RowInputs, names: tuple[str, ...], past: PastRows | None = None, num_last: int = 1
) -> Rows:
    """Run the op so that it writes these fields of `Rows`, check them against the reference, and return them.

    Args:
        num_last: rows per request in `last_rows`.
    """
    requests = len(given.start_positions)
    columns = sum(each.shape[1] for each in (given.token_ids, given.draft_token_ids) if each is not None)
    sizes = dict.fromkeys(Rows._fields, requests * plan.rows) | dict.fromkeys(PER_REQUEST, requests)
    sizes |= {"last_rows": requests * num_last, "draft_step": 1, "rows_without_block": 1}
    sizes |= dict.fromkeys(("context_positions", "context_slots"), requests * columns)
    out = {name: torch.full((sizes[name],), 7, dtype=torch.int32 if name in LENGTHS else torch.int64) for name in names}
    if given.hidden is not None:
        out["hidden"] = torch.full((sizes["hidden"], given.hidden.shape[1]), 7.0)
    rows = Rows(**out)
    expect_reference(run, ops.begin_rows, given, plan, rows, *([] if past is None else [past]), written=out.values())
    return rows


@TABLE.row(
    "begin-propose",
    "Rows, positions, lengths, slots and last rows of a propose are those of a host loop; inert requests are inert.",
    hazard="query-len-zero",
    cause="begin_rows: an inert request's last row, a filler token, or the end of max_model_len",
    quick=True,
    k=[1, 2, 5],
    offset=[0, 1],
)
def begin_propose(run: Run, g: torch.Generator, k: int, offset: int) -> None:
    plan = RowPlan(k + 1, LIMIT, BLOCK, slots_of_rejected=True, position_offset=offset)
    expect_rows(run, plan, a_round(g, k + 1), PLACES + STEPS)


@TABLE.row(
    "begin-verify",
    "Rows, positions, lengths and slots of a verify pass are those of a host loop; inert requests are inert.",
    hazard="num-reqs-unpadded",
    cause="begin_rows: a padded request that keeps a length or a slot, or a draft token -1 that is not 0",
    quick=True,
    k=[0, 3],
)
def begin_verify(run: Run, g: torch.Generator, k: int) -> None:
    blocks, starts = i32([[5, 2, 0], [1, 1, 1], [3, 4, 6], [7, 0, 0]]), torch.tensor([14, -1, 38, 0])
    drafts = torch.tensor([[1, 2, 3], [4, -1, -1], [7, 8, 9], [5, -1, 10]])[:, :k]
    wider = torch.tensor([[11, 0], [12, 0], [13, 0], [14, 0]])  # the last tokens are a column of it
    given = RowInputs(starts, blocks, token_ids=wider[:, :1], draft_token_ids=drafts)
    expect_rows(run, RowPlan(k + 1, LIMIT, BLOCK), given, PLACES)


@TABLE.row(
    "begin-masked",
    "Rows of a drafter that drafts in one causal pass are those of a host loop: sampled tokens, then masked rows "
    "behind the last accepted one, then rows without a slot.",
    hazard="parallel-block-rows",
    cause="begin_rows: masked rows behind the rejected rows instead of the accepted ones, or one of them too many",
    quick=True,
    k=[1, 3],
)
def begin_masked(run: Run, g: torch.Generator, k: int) -> None:
    plan = RowPlan(3 + k - 1, LIMIT, BLOCK, rows_behind=k - 1, filler=MASK)
    expect_rows(run, plan, a_round(g, 3), (*PLACES, "hidden_rows", "last_rows"), num_last=k)


@TABLE.row(
    "begin-block",
    "Context rows and block rows of a parallel drafter are those of a host loop: rejected rows have no slot, the block "
    "begins after the last accepted row, inert requests are inert.",
    hazard="parallel-block-rows",
    cause="begin_rows: the position of the block's first row, a slot of a rejected row, or the end of max_model_len",
    quick=True,
    k=[1, 3],
)
def begin_block(run: Run, g: torch.Generator, k: int) -> None:
    plan = RowPlan(k + 1, LIMIT, BLOCK, after_sampled=True, rows_behind=k + 1, filler=MASK)
    expect_rows(run, plan, a_round(g, k + 1), (*PLACES, "context_positions", "context_slots"))


@TABLE.row(
    "begin-prefill",
    "Rows of a padded prompt pass are those of a host loop: padding has no slot, and row i sees the keys up to its "
    "own.",
    hazard="prompt-padding",
    cause="begin_rows: padded rows that keep a slot, or a length that counts only the real rows",
    quick=True,
    rows={"0-5": (0, 5, 8), "14-8": (14, 8, 8), "36-4": (36, 4, 8), "7-0": (7, 0, 8), "3-200": (3, 30, 200)},
)
def begin_prefill(run: Run, g: torch.Generator, rows: tuple[int, int, int]) -> None:
    first, real, size = rows
    given = RowInputs(torch.tensor([first]), i32([[7, 3, 5, *[0] * 12]]), torch.tensor([real]))
    expect_rows(run, RowPlan(size, LIMIT, BLOCK), given, ("positions", "slot_mapping", "seq_lens", "last_rows"))


@TABLE.row(
    "rows-without-block-are-counted",
    "begin_rows adds the number of rows whose token has a position and no KV block: those of sampled tokens and of the "
    "drafts after them, in this pass or in later steps.",
    hazard="rows-without-block-uncounted",
    cause="a count of rejected rows, of inert requests, of positions past max_model_len, of one kind of row only, or "
    "from the position of the token instead of its row",
    plan={
        "no-drafts": RowPlan(3, LIMIT, BLOCK, slots_of_rejected=True),
        "chain": RowPlan(3, LIMIT, BLOCK, slots_of_rejected=True, rows_behind=3),
        "block": RowPlan(4, LIMIT, BLOCK, after_sampled=True, rows_behind=4),
        "masked": RowPlan(6, LIMIT, BLOCK, rows_behind=3),
        "offset": RowPlan(3, LIMIT, BLOCK, slots_of_rejected=True, rows_behind=3, position_offset=1),
    },
)
def rows_without_block(run: Run, g: torch.Generator, plan: RowPlan) -> None:
    counts, starts = [3, 0, 1, 2, 1, 3, 2, 2], [14, 3, 39, 31, 20, 30, 15, 37]
    blocks = [[5, 0, 2], [0] * 3, [3, 4, 6], [8, 0, 9], [10, 11, 0], [0] * 3, [1, 2, 3], [12, 13, 0]]
    given = RowInputs(torch.tensor(starts), i32(blocks), i32(counts), torch.zeros(8, 3, dtype=torch.int64))
    expect_rows(run, plan, given, (*PLACES, "rows_without_block"))


@TABLE.row(
    "begin-modules",
    "The rows before a round take what was kept of them, without a gap up to the round; tokens, hidden states, slots "
    "and lengths are those of a host loop.",
    hazard="module-past-rows",
    cause="begin_rows: an entry of another position, a gap, a row before position 0, or a rejected row with a slot",
    quick=True,
    past=PAST,
)
def begin_modules(run: Run, g: torch.Generator, past: int, width: int = 24) -> None:
    counts, starts, query_len = [3, 0, 1, 2, 1], [6, 5, 39, 10, 2], 3
    n, held = len(counts), min(past, PAST_BLOCK)
    kept = PastRows(
        torch.randint(100, 190, (21, held), generator=g),
        torch.full((21, held), -1),
        torch.randn(21, held, width, generator=g),
    )
    for blocks, start in zip(PAST_BLOCKS, starts, strict=True):
        for position in range(max(start - past, 0), start):
            kept.positions[blocks[position // PAST_BLOCK], position % PAST_BLOCK % held] = position
    kept.positions[PAST_BLOCKS[3][2], 8 % PAST_BLOCK % held] = 8 + LIMIT  # another text's: a gap from position 8 on
    given = RowInputs(
        torch.tensor(starts),
        i32(PAST_BLOCKS),
        i32(counts),
        torch.randint(0, 90, (n, query_len), generator=g),
        hidden=torch.randn(n * query_len, width, generator=g),
    )
    plan = RowPlan(query_len + past, LIMIT, PAST_BLOCK, past=past)
    expect_rows(run, plan, given, (*PLACES, *STEPS, "hidden", "rows_without_block"), kept)


@TABLE.row(
    "keep-rows",
    "Of the rows of a pass the last ones of each KV block are kept, those without a slot are not, and no other entry "
    "changes.",
    hazard="module-past-rows",
    cause="keep_rows: an earlier row of the same entry wins, a rejected or padded row is kept",
    quick=True,
    past=PAST,
)
def keep_rows(run: Run, g: torch.Generator, past: int, width: int = 24) -> None:
    spans = [(2, 0, 15, 13), (0, 5, 3, 3), (1, 3, 4, 1), (3, 11, 1, 0), (4, 0, 1, 1)]  # request, first, rows, with slot
    places = [(r, first + i, i < real) for r, first, rows, real in spans for i in range(rows)]
    slots = [
        slot_of(position, PAST_BLOCKS[r], LIMIT, PAST_BLOCK) if real else NULL_SLOT for r, position, real in places
    ]
    positions = torch.tensor([position for _, position, _ in places])
    _expect_kept(run, g, positions, torch.tensor(slots), 21, min(past, PAST_BLOCK), PAST_BLOCK, width)


@TABLE.row(
    "rows-of-a-long-pass",
    "Of a pass of 600 rows the last three of each KV block are kept.",
    hazard="many-in-one-program",
    cause="keep_rows: rows past a tile, or a later row of an entry that is looked for in part of the pass",
)
def keep_long_pass(run: Run, g: torch.Generator) -> None:
    order = torch.randperm(40, generator=g) + 1
    positions = torch.arange(600) + 9
    slots = order[positions // BLOCK] * BLOCK + positions % BLOCK
    slots[500:520] = NULL_SLOT
    _expect_kept(run, g, positions, slots, 41, 3, BLOCK, 24)


def _expect_kept(
    run: Run, g: torch.Generator, positions: Tensor, slots: Tensor, blocks: int, held: int, block_size: int, width: int
) -> None:
    tokens = torch.randint(10, 90, slots.shape, generator=g)
    states = torch.randn(len(slots), width, generator=g)
    random = torch.randint(0, 9, (blocks, held), generator=g), torch.randn(blocks, held, width, generator=g)
    into = PastRows(random[0], torch.full((blocks, held), -1), random[1])
    expect_reference(run, ops.keep_rows, tokens, states, positions, slots, into, block_size, written=into)


@TABLE.row(
    "modules-of-wide-rows",
    "Past rows of 5,000 values are kept, and taken again, with every value.",
    hazard="wide-rows",
    cause="begin_rows or keep_rows: values past a chunk of a row are left out",
)
def modules_of_wide_rows(run: Run, g: torch.Generator) -> None:
    begin_modules(run, g, 3, 5000)
    keep_rows(run, g, 3, 5000)


@TABLE.row(
    "shift-token-ids",
    "Each row takes the token of the row after it, the last accepted row the latest draft token, and live lengths grow "
    "by one.",
    hazard="module-token-shift",
    cause="shift_token_ids: the latest draft token goes to the last row of the request, not the last accepted one",
    quick=True,
)
def shift_token_ids(run: Run, g: torch.Generator) -> None:
    counts, query_len = [4, 1, 2, 3, 4, 1, 3, 2, 1], 4
    n = len(counts)
    before, latest = torch.randint(0, 90, (n, query_len), generator=g), torch.arange(100, 100 + n)
    ids, step = before.flatten().clone(), torch.tensor([2])
    last = torch.tensor([r * query_len + count - 1 for r, count in enumerate(counts)])
    lengths = i32([0 if r == 5 else 20 + r for r in range(n)])
    wanted = torch.where(lengths > 0, lengths + 1, 0)
    run(ops.shift_token_ids, ids, last, latest, lengths, step, written=(ids, lengths, step))
    for r, count in enumerate(counts):
        row = torch.tensor([*before[r, 1:count], int(latest[r])])
        expect_equal(ids.view(n, -1)[r, :count], row, f"accepted rows of request {r}, whose last is row {count - 1}")
    expect_equal(lengths, wanted, "lengths")
    assert step.tolist() == [3]


@TABLE.row(
    "advance",
    "advance moves the one row of each live request one token forward as a host loop does; inert requests stay inert.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="advance: lengths, positions or slots that stay behind, or a slot past max_model_len or in the null block",
    quick=True,
    requests=[9],
)
@TABLE.row(
    "places-of-many-requests",
    "For 300 requests, advance moves lengths, positions and slots as a host loop does, across the end of a block and "
    "past max_model_len.",
    hazard="many-in-one-program",
    cause="advance: requests past a tile, block tables read at another width, or an inert request that moves",
    requests=[300],
)
def advance(run: Run, g: torch.Generator, requests: int) -> None:
    lengths = torch.randint(0, LIMIT + 1, (requests,), generator=g).int()
    lengths[::7] = 0
    lengths[1:4] = i32([BLOCK - 1, LIMIT - 1, LIMIT])
    wide = torch.randint(0, 900, (requests, 9), generator=g).int()
    wide[::2, 3:] = NULL_BLOCK
    _expect_advanced(run, lengths, wide[:, 1:7], LIMIT, BLOCK)  # a part of a wider table


@TABLE.row(
    "places-of-late-tokens",
    "advance and begin_rows give rows on both sides of positions 32,768 and 65,536 the positions, lengths and slots of "
    "a host loop.",
    hazard="positions-in-16-bits",
    cause="advance or begin_rows: positions, lengths or block numbers in 16 bits",
)
def late_tokens(run: Run, g: torch.Generator) -> None:
    limit, size = 70_000, 128
    table = torch.randint(1, 200_000, (5, -(-limit // size)), generator=g).int()
    _expect_advanced(run, i32([32_766, 32_767, 65_535, 0, 40]), table, limit, size)
    starts = torch.tensor([32_766, 32_767, 65_534, 5, 69_990])
    given = RowInputs(starts, table, i32([3, 1, 2, 0, 3]), torch.randint(0, 90, (5, 3), generator=g))
    expect_rows(run, RowPlan(3, limit, size, slots_of_rejected=True, rows_behind=2), given, (*PLACES, *STEPS))


def _expect_advanced(run: Run, lengths: Tensor, table: Tensor, limit: int, block_size: int) -> None:
    """Advance by three draft steps, each from the results of the one before."""
    places = lengths, torch.full(lengths.shape, -77), torch.full(lengths.shape, -77), torch.tensor([1])
    for _ in range(3):
        expect_reference(run, ops.advance, *places, table, limit, block_size, written=places)

"""Rows of attention over one rank's keys, and of the sum over ranks, against softmax over all keys."""

from __future__ import annotations

import torch
from specgraph import ops
from specgraph.ops import DeviceLengths, KVCache, Mask
from torch import Tensor

from specgraph_conformance.linear_oracles import TOLERANCE
from specgraph_conformance.op_table import FLOATS, Run, Table
from specgraph_conformance.rig import expect_close

TABLE = Table()
BLOCK, HEADS, KV_HEADS, DIM, SCALE = 16, 4, 2, 8, 0.35
LENGTHS = [33, 0, 1, 18]
"""The lengths of the requests. The second request is inert, and the third leaves some ranks without a key."""


def whole(g: torch.Generator, rows: int, dtype: torch.dtype) -> tuple[Tensor, KVCache, Tensor]:
    """Return queries [4 * rows, heads, dim], caches of all keys, and block tables."""
    query = torch.randn(len(LENGTHS) * rows, HEADS, DIM, generator=g).to(dtype)
    cache = torch.randn(2, 13, BLOCK, KV_HEADS, DIM, generator=g).to(dtype)
    return query, KVCache(*cache), (torch.randperm(12, generator=g) + 1).view(4, 3).int()


def own(cache: KVCache, rank: int, ranks: int) -> KVCache:
    """Return the cache of one rank: every `ranks`-th position."""
    return KVCache(*(part[:, rank::ranks].contiguous() for part in cache))


def softmax_over(query: Tensor, cache: KVCache, table: Tensor, request: int, seen: list[int]) -> tuple[Tensor, Tensor]:
    """Return a row's attention over the positions `seen`, float64 [heads, dim], and its log-sum-exp, [heads]."""
    at = [(int(table[request, position // BLOCK]), position % BLOCK) for position in seen]
    if not at:
        return torch.zeros(HEADS, DIM, dtype=torch.float64), torch.full((HEADS,), float("-inf"), dtype=torch.float64)
    keys, values = (torch.stack([part[cell] for cell in at]).double() for part in cache)
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
    scores = torch.einsum("hd,phd->hp", query.double(), keys) * SCALE
    return torch.einsum("hp,phd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


@TABLE.row(
    "attention-of-a-rank",
    "Attention over every N-th key of each request, with the log of its sum, is that of the keys that a rank holds.",
    hazard="rank-without-keys",
    cause="attend_part or attend_part_host: keys of another rank, keys past the row's own, or a log of no keys that is "
    "not -inf",
    ranks=[2, 4],
    dtype=FLOATS,
)
def attention_of_a_rank(run: Run, g: torch.Generator, ranks: int, dtype: torch.dtype) -> None:
    rows, rank = 3, 1
    query, cache, table = whole(g, rows, dtype)
    starts = torch.arange(0, len(LENGTHS) * rows + 1, rows, dtype=torch.int32)
    lengths = DeviceLengths(torch.tensor(LENGTHS, dtype=torch.int32), starts, rows)
    part, at = own(cache, rank, ranks), (rank, ranks)
    found = run(ops.attend_part, query, part, table, lengths, Mask(), *at, scale=SCALE)
    by_row = table.repeat_interleave(rows, dim=0)
    seen = [[p for p in range(max(0, n - rows + row + 1)) if p % ranks == rank] for n in LENGTHS for row in range(rows)]
    out = torch.full_like(found, -7.0)
    run(ops.attend_part_host, query, part, by_row, [len(each) for each in seen], scale=SCALE, out=out, written=[out])
    for row, positions in enumerate(seen):
        if LENGTHS[row // rows]:
            values, total = softmax_over(query[row], cache, table, row // rows, positions)
            for what, given in (("device", found[row]), ("host", out[row])):
                name = f"row {row}, {what} lengths"
                expect_close(given[:, :DIM], values, TOLERANCE[dtype], name)
                expect_close(given[:, DIM].exp(), total.exp(), TOLERANCE[dtype], f"sum of {name}")


@TABLE.row(
    "sum-of-parts",
    "Parts of several ranks add up to attention over all keys for the heads that are asked for; a row without keys "
    "gives zeros.",
    hazard="rank-without-keys",
    cause="sum_parts: parts that are not weighed by their sums, heads of another rank, or NaN where no rank has a key",
    ranks=[2, 4],
)
def sum_of_parts(run: Run, g: torch.Generator, ranks: int) -> None:
    values = torch.randn(ranks, 5, HEADS, DIM, generator=g)
    totals = 3 * torch.randn(ranks, 5, HEADS, 1, generator=g)
    totals[1:, 1], totals[:, 3] = float("-inf"), float("-inf")
    values[1:, 1], values[:, 3] = 0.0, 0.0
    parts = torch.cat((values, totals), dim=-1).flatten(0, 1)
    found = run(ops.sum_parts, parts, ranks, 1, 2)
    weights = totals.double().exp()[:, :, 1:3]
    total = weights.sum(dim=0)
    wanted = (weights * values.double()[:, :, 1:3]).sum(dim=0) / total.where(total > 0, torch.ones_like(total))
    expect_close(found, wanted, 1e-4, "the sum")

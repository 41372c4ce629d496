"""The rows of a ragged verify: each request's last token, and the drafts of all requests that are likeliest accepted.

The pass has a fixed number of rows, and every row is some request's: how many each has is decided on the device, so
that one captured graph serves every split. Inert requests get rows only where all drafts of the others have one.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import Axes, PerRow
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.library import op
from specgraph.ops.slots import slots_of


class RaggedRows(NamedTuple):
    """The split of the rows of a pass over R requests, and where it comes from."""

    confidence: Annotated[Tensor, Axes(columns="drafts", is_packed=True)]
    """float32 [R, K]: the chance that a draft token is accepted if all before it are, from what is known before it."""
    query_start_loc: Annotated[Tensor, Axes(more=1)]
    """int32 [R + 1], written: the first row of each request, and the number of rows."""
    columns: PerRow
    """int64 [R * (K + 1)], written: the row of each column of a request; of a draft that has none, its last row."""


def choose_drafts(confidence: Tensor, live: Tensor, num_drafts: int) -> Tensor:
    """Return how many drafts of each request are verified, int64 [R]: the likeliest `num_drafts` of all requests.

    A draft is as likely as it and all before it are accepted together, so a request's are taken from its first on. Of
    equals the earlier column comes first. So whether a draft is taken follows from what was known before its token was
    drawn, which keeps the verify lossless.

    Args:
        confidence: float32 [R, K], as in `RaggedRows`.
        live: bool [R]: the drafts of other requests come last.
    """
    requests, steps = confidence.shape
    chance = torch.where(live[:, None], confidence.cumprod(dim=1), -1.0).t().flatten()
    order = chance.sort(descending=True, stable=True).indices[:num_drafts]
    return order.new_zeros(steps * requests).index_fill(0, order, 1).view(steps, requests).sum(dim=0)


@op(writes=("ragged.query_start_loc", "ragged.columns", "rows", "given.draft_token_ids"))
def begin_ragged_rows(given: RowInputs, plan: RowPlan, rows: Rows, ragged: RaggedRows) -> None:
    """Fill T rows of a verify of R requests with K drafts each.

    Args:
        given: the last tokens [R, 1] and the drafts [R, K], which become -1 where they get no row.
        rows: positions, slot_mapping, seq_lens and token_ids; R <= T <= R * (K + 1).
    """
    drafts, last, start = given.draft_token_ids, given.token_ids, given.start_positions
    assert drafts is not None
    assert last is not None
    assert rows.token_ids is not None
    requests, steps = drafts.shape
    total, live = rows.positions.shape[0], start >= 0
    counts = choose_drafts(ragged.confidence, live, total - requests)
    end = (counts + 1).cumsum(dim=0)
    begin, column = end - counts - 1, torch.arange(steps + 1, device=drafts.device)
    ragged.query_start_loc.copy_(torch.cat((begin, end[-1:])))
    ragged.columns.copy_((begin[:, None] + column.minimum(counts[:, None])).flatten())
    request = torch.searchsorted(end, torch.arange(total, device=end.device), right=True)
    place = torch.arange(total, device=end.device) - begin[request]
    rows.token_ids.copy_(torch.cat((last, drafts), dim=1).clamp(min=0)[request, place])
    position, alive, table = start[request] + place, live[request], given.block_table[request]
    rows.positions.copy_(torch.where(alive, position, 0).clamp(0, plan.max_model_len - 1))
    slots = slots_of(position[:, None], table, alive[:, None], plan.max_model_len, plan.block_size)
    rows.slot_mapping.copy_(slots[:, 0])
    rows.seq_lens.copy_(torch.where(live, start + counts + 1, 0))
    drafts.copy_(torch.where(column[:-1] < counts[:, None], drafts, -1))

"""The rows of a ragged verify: each request's last token, and of all requests' drafts the most likely accepted ones.

The pass has a fixed number of rows, and every row belongs to a request. The number of rows per request is decided on
the device, so that one captured graph serves every split. Drafts of inert requests get rows only after all drafts of
the other requests have one.
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
    """The split of a pass's rows over R requests, and the confidence that decides it."""

    confidence: Annotated[Tensor, Axes(columns="drafts", is_packed=True)]
    """float32 [R, K]: the chance that a draft token is accepted if all before it are. It may not depend on the token
    itself or on later ones."""
    query_start_loc: Annotated[Tensor, Axes(more=1)]
    """int32 [R + 1], written: the first row of each request, then the number of rows."""
    columns: PerRow
    """int64 [R * (K + 1)], written: the row of each column of a request. A draft without a row has the request's last
    row."""


def choose_drafts(confidence: Tensor, live: Tensor, num_drafts: int) -> Tensor:
    """Choose the likeliest `num_drafts` drafts of all requests. Return the number of each request, int64 [R].

    The likelihood of a draft is the chance that it and all drafts before it are accepted, so a request's drafts are
    taken from the first on. Among equals the earlier column comes first. So the choice of a draft does not depend on
    its token or on later ones, which keeps the verify lossless.

    Args:
        confidence: float32 [R, K], as in `RaggedRows`.
        live: bool [R]: the drafts of a request come last if it is False.
    """
    requests, steps = confidence.shape
    chance = torch.where(live[:, None], confidence.cumprod(dim=1), -1.0).t().flatten()
    order = chance.sort(descending=True, stable=True).indices[:num_drafts]
    return order.new_zeros(steps * requests).index_fill(0, order, 1).view(steps, requests).sum(dim=0)


@op(writes=("ragged.query_start_loc", "ragged.columns", "rows", "given.draft_token_ids"))
def begin_ragged_rows(given: RowInputs, plan: RowPlan, rows: Rows, ragged: RaggedRows) -> None:
    """Fill the T rows of a ragged verify of R requests with K drafts each: R <= T <= R * (K + 1).

    Args:
        given: `token_ids` are the last tokens, [R, 1], and `draft_token_ids` the drafts, [R, K]. A draft that gets no
            row becomes -1.
        rows: positions, slot_mapping, seq_lens and token_ids are written.
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

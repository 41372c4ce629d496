"""Moving a drafter with one module a step on to its next module: every row takes the token one place further."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.library import define


def _shift(token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor) -> None:
    requests = last_rows.shape[0]
    rows = token_ids.view(requests, -1)
    column = torch.arange(rows.shape[1], device=rows.device)
    last = last_rows[:, None] - torch.arange(requests, device=rows.device)[:, None] * rows.shape[1]
    following = torch.cat([rows[:, 1:], rows[:, -1:]], dim=1)
    token_ids.copy_(torch.where(column == last, latest[:, None], following).flatten())
    seq_lens.add_(seq_lens > 0)
    draft_step.add_(1)


_shift_op = define(
    "shift_token_ids(Tensor(a!) token_ids, Tensor last_rows, Tensor latest, Tensor(b!) seq_lens,"
    " Tensor(c!) draft_step) -> ()",
    reference=_shift,
)


def shift_token_ids(token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor) -> None:
    """Move each request's tokens up by one row, with the latest draft token at its last accepted row, in place.

    Rows past the last accepted one hold anything: they are never selected, and no accepted row sees them.

    Args:
        token_ids: int64 [R * q], written.
        last_rows: int64 [R]: the row of each request's last accepted token.
        latest: int64 [R]: the draft token of the step before.
        seq_lens: int32 [R], 1 added where live: names the position that the next draft token stands at.
        draft_step: int64 [1], 1 added.
    """
    _shift_op(token_ids, last_rows, latest, seq_lens, draft_step)

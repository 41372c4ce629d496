"""Between two rounds, on the device: requests move on from their last propose to their next verify."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op


@op(writes=("start_positions", "last_token_ids", "to_draft_token_ids"))
def next_verify(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    last_token_ids: Tensor,
    to_draft_token_ids: Tensor,
) -> None:
    """Write the inputs of the verify that follows a propose: last token, position and drafts of each request.

    Args:
        sampled_token_ids: int64 [R, query_len]: what the target's last round sampled.
        num_sampled: int32 [R]; 0 marks an inert request.
        draft_token_ids: int64 [R, K], what the drafter proposed after it.
        start_positions: int64 [R], written: num_sampled is added; -1 for inert requests.
        last_token_ids: int64 [R], written: the last sampled token; 0 for inert requests.
        to_draft_token_ids: int64 [R, K], written: the drafts.
    """
    live = num_sampled > 0
    last = (num_sampled[:, None].long() - 1).clamp(min=0)
    last_token_ids.copy_(torch.where(live, sampled_token_ids.gather(1, last)[:, 0], 0))
    start_positions.copy_(torch.where(live, start_positions + num_sampled, -1))
    to_draft_token_ids.copy_(draft_token_ids)

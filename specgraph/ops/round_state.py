"""Between two rounds, on the device: requests that finished become inert, the others move on to their next verify."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op


def _sampled_a_stop(sampled_token_ids: Tensor, num_sampled: Tensor, stop_token_ids: Tensor) -> Tensor:
    """bool [R]: a stop token is among the first num_sampled of the request; arguments as in `stop_finished`."""
    column = torch.arange(sampled_token_ids.shape[1], device=sampled_token_ids.device)
    given = column < num_sampled[:, None]
    stops = (sampled_token_ids[:, :, None] == stop_token_ids[:, None, :]) & (stop_token_ids[:, None, :] >= 0)
    return (stops.any(dim=2) & given).any(dim=1)


@op(writes=("num_sampled", "remaining"))
def stop_finished(sampled_token_ids: Tensor, num_sampled: Tensor, remaining: Tensor, stop_token_ids: Tensor) -> None:
    """Make requests inert that sampled a stop token or their last token; the host need not have seen it.

    Args:
        sampled_token_ids: int64 [R, query_len], of which the first num_sampled are tokens.
        num_sampled: int32 [R], written: 0 where a stop token is among the sampled ones, or as many tokens were sampled
            as remained.
        remaining: int64 [R], written: tokens that the request may still give; num_sampled is subtracted, at least 0.
        stop_token_ids: int64 [R, S]; -1 where a request has fewer than S.
    """
    stopped = _sampled_a_stop(sampled_token_ids, num_sampled, stop_token_ids)
    finished = stopped | (num_sampled >= remaining)
    remaining.copy_((remaining - num_sampled).clamp(min=0))
    num_sampled.copy_(torch.where(finished, 0, num_sampled))


@op(writes=("start_positions", "last_token_ids", "to_draft_token_ids"))
def next_verify(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    draft_token_ids: Tensor,
    start_positions: Tensor,
    last_token_ids: Tensor,
    to_draft_token_ids: Tensor,
) -> None:
    """The inputs of the verify that follows a propose: last token, position and drafts of each request.

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


@op(writes=("ring", "progress", "again"))
def publish_round(
    results: Tensor,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    remaining: Tensor,
    stop_token_ids: Tensor,
    ring: Tensor,
    progress: Tensor,
    again: Tensor,
    rounds_per_launch: int,
) -> None:
    """Write what a round sampled into the next slot of a ring, and say whether the launch has another round.

    Args:
        results: int64 [T]: what is written.
        sampled_token_ids: int64 [R, query_len], of which the first num_sampled are tokens.
        num_sampled: int32 [R]; 0 marks an inert request.
        remaining: int64 [R]: tokens that the request might still give before this round.
        stop_token_ids: int64 [R, S]; -1 where a request has fewer than S.
        ring: int64 [slots, T + 2], written: one slot gets `results`, the number of the round, counted from 1, and
            `again`. Round n goes to slot (n - 1) % slots.
        progress: int64 [2], written: rounds so far, and those of this launch.
        again: int32 [1], written: 1 where the launch goes on: it has had fewer than `rounds_per_launch` rounds, and a
            request sampled neither a stop token nor its last token.
    """
    stopped = _sampled_a_stop(sampled_token_ids, num_sampled, stop_token_ids)
    goes_on = ((num_sampled > 0) & (num_sampled < remaining) & ~stopped).any(dim=0, keepdim=True)
    number, done = progress[:1] + 1, progress[1:] + 1
    goes_on = goes_on & (done < rounds_per_launch)
    written = torch.cat([results, number, goes_on.long()])
    ring.index_copy_(0, (number - 1) % ring.shape[0], written[None])
    progress.copy_(torch.cat([number, torch.where(goes_on, done, 0)]))
    again.copy_(goes_on)

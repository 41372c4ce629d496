"""The end of an engine's round, written into the drafter's memory: one kernel on a device, plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.draft import ProposeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutput:
    """The tensors that a verify leaves for n requests, as engines keep them: `query_len` = K + 1 rows each, or any
    numbers of rows with `first_rows`.

    Rows of a request follow each other, and requests are in the order of the batch.
    """

    token_ids: Tensor
    """integer [>= n * query_len]: the token after each row, of which a request's first `num_sampled` are its new ones.
    With `last_tokens` the token of each row: the first row's, then the draft tokens."""
    num_sampled: Tensor
    """integer [n]: accepted + 1, and 1 at a prompt's end; 0 makes a request inert."""
    starts: Tensor
    """integer [n]: the position of each request's first row."""
    table: Tensor
    """int32 [rows, columns]: the KV block of each block of positions, or with `table_of_slots` the KV slot of each
    position. Entries past what a request has been given are stale."""
    hidden_states: Sequence[Tensor]
    """[>= n * query_len, size] each: those that the drafter takes of the target, side by side."""
    first_rows: Tensor | None = None
    """integer [n]: the first row of each request, the last one of a prompt at its end; by default query_len rows belong
    to each request."""
    table_of_slots: bool = False
    table_rows: Tensor | None = None
    """integer [n]: the row of each request in `table`; by default rows are in the order of the batch."""
    last_tokens: Tensor | None = None
    """integer [rows]: the token that the target sampled last, which follows a request's accepted draft tokens."""
    last_rows: Tensor | None = None
    """integer [n]: the place of each request in `last_tokens`; -1 where it is the token of the row behind instead."""
    temperature: Tensor | None = None
    """float32 [n], where drafts are sampled."""
    seeds: Tensor | None = None
    """int64 [n], where drafts are sampled."""

    @property
    def num_requests(self) -> int:
        return self.num_sampled.shape[0]


def fill_batch(end: VerifyOutput, into: ProposeBatch, max_model_len: int, block_size: int, reach: int) -> None:
    """Write the round into the drafter's memory. `into` may be padded: requests past n become inert.

    Of a request's blocks only those that this round and its drafts can reach are taken,
    ceil(min(start + max(reach, num_sampled), max_model_len) / block_size), which the engine has allocated; the rest is
    block 0.

    Args:
        into: at least n requests, of the drafter's `inputs`; rows of `block_table` may be far from each other.
        max_model_len, block_size: in tokens.
        reach: 2 * K + 1 positions from the first row's on; 2 * K + 2 where the drafter has a row for the last token; 0
            for rows of a prompt, behind which nothing is drafted.
    """
    if end.num_sampled.device.type == "cpu":
        fill_batch_reference(end, into, max_model_len, block_size, reach)
    else:
        from specgraph_plugin.verify_output_triton import fill_batch_by_kernel

        fill_batch_by_kernel(end, into, max_model_len, block_size, reach)


def fill_batch_reference(
    end: VerifyOutput, into: ProposeBatch, max_model_len: int, block_size: int, reach: int
) -> None:
    """Do `fill_batch` in plain torch."""
    n, query_len = end.num_requests, into.query_len
    count = end.num_sampled.long()[:, None]
    column = torch.arange(query_len, device=count.device)
    first = torch.arange(n, device=count.device) * query_len if end.first_rows is None else end.first_rows.long()
    rows = first[:, None] + column
    if end.last_tokens is not None and end.last_rows is not None:
        tokens = end.token_ids[(rows + 1).clamp(max=end.token_ids.shape[0] - 1)].long()
        places = end.last_rows.long()[:, None]
        last = end.last_tokens.view(-1)[places.clamp(min=0)]
        tokens = torch.where((column == count - 1) & (places >= 0), last, tokens)
    else:
        tokens = end.token_ids[rows.clamp(max=end.token_ids.shape[0] - 1)].long()
    into.sampled_token_ids[:n] = torch.where(column < count, tokens, 0)
    into.num_sampled[:n] = end.num_sampled
    into.num_sampled[n:] = 0
    into.start_positions[:n] = end.starts
    taken = rows.flatten().clamp(max=end.hidden_states[0].shape[0] - 1)
    into.aux_hidden[: n * query_len] = torch.cat([states[taken] for states in end.hidden_states], dim=1)
    table = end.table[:n] if end.table_rows is None else end.table[end.table_rows.long()]
    if end.table_of_slots:
        table = table[:, ::block_size] // block_size
    ends = (end.starts.long() + count[:, 0].clamp(min=reach)).clamp(max=max_model_len)
    width = min(table.shape[1], into.block_table.shape[1])
    owned = torch.arange(width, device=table.device) * block_size < ends[:, None]
    into.block_table[:n] = 0
    into.block_table[:n, :width] = torch.where(owned, table[:, :width], 0)

"""Copies the results of a host engine's verify into the drafter's buffers by one op.

A device whose Triton kernels are registered has it as one kernel; any other runs plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.draft import ProposeBatch
from specgraph.ops.copies import BatchTensors
from specgraph.ops.library import name_kernels, op


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutput:
    """The tensors that a host engine's verify leaves for n requests.

    A request has `query_len` = K + 1 rows, or any number of rows if `first_rows` is given. The rows of a request follow
    each other, and requests are in the order of the batch.
    """

    token_ids: Tensor
    """integer [>= n * query_len]: the token after each row. A request's first `num_sampled` are its new tokens. If
    `last_tokens` is given, it is the token of each row instead: the first row's token, then the draft tokens."""
    num_sampled: Tensor
    """integer [n]: the accepted draft tokens + 1. It is 1 at a prompt's end; 0 makes a request inert."""
    starts: Tensor
    """integer [n]: the position of each request's first row."""
    table: Tensor
    """int32 [rows, columns]: a request's KV blocks in order. If `table_of_slots` is True, the KV slot of each position.
    Entries past the request's allocated blocks may be stale."""
    hidden_states: Sequence[Tensor]
    """[>= n * query_len, size] each: the target's hidden states that the drafter concatenates."""
    first_rows: Tensor | None = None
    """integer [n]: the first row of each request. At a prompt's end it is the prompt's last row. None if every request
    has query_len rows."""
    table_of_slots: bool = False
    table_rows: Tensor | None = None
    """integer [n]: the row of each request in `table`. None if the rows are in the order of the batch."""
    last_tokens: Tensor | None = None
    """integer [rows]: the token that the target sampled last, after a request's accepted draft tokens."""
    last_rows: Tensor | None = None
    """integer [n]: the index of each request in `last_tokens`. -1 if its last token is the next row's token instead."""
    temperature: Tensor | None = None
    """float32 [n]. It may be None if drafts are not sampled."""
    seeds: Tensor | None = None
    """int64 [n]. It may be None if drafts are not sampled."""

    @property
    def num_requests(self) -> int:
        return self.num_sampled.shape[0]


def fill_batch(output: VerifyOutput, into: ProposeBatch, max_model_len: int, block_size: int, reach: int) -> None:
    """Copy a verify's results into the drafter's buffers. `into` may be padded: requests past n become inert.

    A request gets the first ceil(min(start + max(reach, num_sampled), max_model_len) / block_size) entries of its row
    in the table: its rows and drafts reach no further block. The host engine must have allocated these blocks. All
    other entries become block 0.

    Args:
        into: the drafter's `inputs` for at least n requests. The rows of its `block_table` need not be adjacent.
        max_model_len, block_size: in tokens.
        reach: the positions, from a request's first row on, that its rows and drafts can need: 2 * K + 1, or 2 * K + 2
            if the drafter has a row for the last draft token. 0 for the rows of a prompt, after which nothing is
            drafted.
    """
    load_verify_output.on(output.num_sampled.device)(
        output.token_ids,
        output.num_sampled,
        output.starts,
        output.table,
        [*output.hidden_states],
        BatchTensors(into.sampled_token_ids, into.num_sampled, into.start_positions, into.aux_hidden, into.block_table),
        output.first_rows,
        output.table_rows,
        output.last_tokens,
        output.last_rows,
        output.table_of_slots,
        max_model_len,
        block_size,
        reach,
    )


@op(writes=("to",))
def load_verify_output(
    token_ids: Tensor,
    num_sampled: Tensor,
    starts: Tensor,
    table: Tensor,
    hidden_states: Sequence[Tensor],
    to: BatchTensors,
    first_rows: Tensor | None,
    table_rows: Tensor | None,
    last_tokens: Tensor | None,
    last_rows: Tensor | None,
    table_of_slots: bool,
    max_model_len: int,
    block_size: int,
    reach: int,
) -> None:
    """Write the results of a verify of n requests over the first n of the R requests in the buffers `to`.

    See `fill_batch`; the tensors given are the fields of a `VerifyOutput`.
    """
    n, query_len = num_sampled.shape[0], to.sampled_token_ids.shape[1]
    count = num_sampled.long()[:, None]
    column = torch.arange(query_len, device=count.device)
    first = torch.arange(n, device=count.device) * query_len if first_rows is None else first_rows.long()
    rows = first[:, None] + column
    if last_tokens is not None and last_rows is not None:
        tokens = token_ids[(rows + 1).clamp(max=token_ids.shape[0] - 1)].long()
        places = last_rows.long()[:, None]
        last = last_tokens.view(-1)[places.clamp(min=0)]
        tokens = torch.where((column == count - 1) & (places >= 0), last, tokens)
    else:
        tokens = token_ids[rows.clamp(max=token_ids.shape[0] - 1)].long()
    to.sampled_token_ids[:n] = torch.where(column < count, tokens, 0)
    to.num_sampled[:n] = num_sampled
    to.num_sampled[n:] = 0
    to.start_positions[:n] = starts
    taken = rows.flatten().clamp(max=hidden_states[0].shape[0] - 1)
    to.aux_hidden[: n * query_len] = torch.cat([states[taken] for states in hidden_states], dim=1)
    entries = table[:n] if table_rows is None else table[table_rows.long()]
    if table_of_slots:
        entries = entries[:, ::block_size] // block_size
    ends = (starts.long() + count[:, 0].clamp(min=reach)).clamp(max=max_model_len)
    width = min(entries.shape[1], to.block_table.shape[1])
    owned = torch.arange(width, device=table.device) * block_size < ends[:, None]
    to.block_table[:n] = 0
    to.block_table[:n, :width] = torch.where(owned, entries[:, :width], 0)


name_kernels("specgraph_plugin.kernels.implement:KERNELS")

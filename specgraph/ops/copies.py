"""Copies into persistent buffers, one op each: selected rows, a round as an engine hands it over, and the inputs of the
verify that follows a propose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK


class RoundTensors(NamedTuple):
    """A round of n requests, or the memory of one."""

    sampled_token_ids: Tensor
    """int64 [n, query_len]"""
    num_sampled: Tensor
    """int32 [n]"""
    start_positions: Tensor
    """int64 [n]"""
    aux_hidden: Tensor
    """[n * query_len, aux_size]"""
    block_table: Tensor
    """int32 [n, max_blocks]"""


@op(writes=("out",))
def take_rows(source: Tensor, rows: Tensor | None, out: Tensor) -> None:
    """out [R, size] = source[rows] of source [T, size] and rows int64 [R], or all of source when `rows` is None.

    out has the same dtype, and shares no memory with source.
    """
    out.copy_(source if rows is None else source[rows])


@op(writes=("to",))
def load_round(given: RoundTensors, to: RoundTensors) -> None:
    """Write a round of n requests over the first n of the R requests in the buffers; the later ones become inert.

    Args:
        given: the round; its block table may be narrower than that of the buffers.
        to: the buffers, written; the null block fills columns of the block table behind those of the round's.
    """
    n, width = given.block_table.shape
    to.sampled_token_ids[:n].copy_(given.sampled_token_ids)
    to.num_sampled[:n].copy_(given.num_sampled)
    to.num_sampled[n:].zero_()
    to.start_positions[:n].copy_(given.start_positions)
    to.aux_hidden[: given.aux_hidden.shape[0]].copy_(given.aux_hidden)
    to.block_table[:n, :width].copy_(given.block_table)
    to.block_table[:n, width:].fill_(NULL_BLOCK)


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

"""Copies into persistent buffers, one op each: selected rows, and a round as an engine hands it over."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK


class BatchTensors(NamedTuple):
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
def load_round(given: BatchTensors, to: BatchTensors) -> None:
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

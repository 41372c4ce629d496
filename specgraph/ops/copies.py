"""Copies into persistent buffers, one op each: selected rows, and a host engine's batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK


class BatchTensors(NamedTuple):
    """The tensors of a batch of n requests, or the buffers that hold them."""

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
    """Write source[rows] into out [R, size], with source [T, size] and rows int64 [R]. If rows is None, all of source.

    out has the dtype of source, and shares no memory with it.
    """
    out.copy_(source if rows is None else source[rows])


@op(writes=("to",))
def load_batch(given: BatchTensors, to: BatchTensors) -> None:
    """Write a batch of n requests over the first n of the R requests in the buffers. The later ones become inert.

    Args:
        given: the batch. Its block table may be narrower than the buffers' one.
        to: the buffers to write. The null block fills the columns of the block table that the batch lacks.
    """
    n, width = given.block_table.shape
    to.sampled_token_ids[:n].copy_(given.sampled_token_ids)
    to.num_sampled[:n].copy_(given.num_sampled)
    to.num_sampled[n:].zero_()
    to.start_positions[:n].copy_(given.start_positions)
    to.aux_hidden[: given.aux_hidden.shape[0]].copy_(given.aux_hidden)
    to.block_table[:n, :width].copy_(given.block_table)
    to.block_table[:n, width:].fill_(NULL_BLOCK)

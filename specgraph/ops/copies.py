"""Copies into persistent buffers, one op each: selected rows, and a round as an engine hands it over."""

from __future__ import annotations

from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK


@op(writes=("out",))
def take_rows(source: Tensor, rows: Tensor | None, out: Tensor) -> None:
    """out = source[rows], or all of source when `rows` is None.

    Args:
        source: [T, size].
        rows: int64 [R], each in 0..T - 1.
        out: [R, size] of the same dtype, written; shares no memory with `source`.
    """
    out.copy_(source if rows is None else source[rows])


@op(
    writes=("to_sampled_token_ids", "to_num_sampled", "to_start_positions", "to_aux_hidden", "to_block_table")
)  # fmt: skip
def load_round(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    aux_hidden: Tensor,
    block_table: Tensor,
    *,
    to_sampled_token_ids: Tensor,
    to_num_sampled: Tensor,
    to_start_positions: Tensor,
    to_aux_hidden: Tensor,
    to_block_table: Tensor,
) -> None:
    """Write a round of n requests over the first n of the R requests in the buffers; the later ones become inert.

    Args:
        sampled_token_ids: int64 [n, query_len].
        num_sampled: int32 [n].
        start_positions: int64 [n].
        aux_hidden: [n * query_len, aux_size].
        block_table: int32 [n, b]; columns after b are filled with the null block.
        to_sampled_token_ids: [R, query_len], to_num_sampled: [R], to_start_positions: [R],
            to_aux_hidden: [R * query_len, aux_size], to_block_table: [R, max_blocks]: the buffers, written.
    """
    n, width = block_table.shape
    to_sampled_token_ids[:n].copy_(sampled_token_ids)
    to_num_sampled[:n].copy_(num_sampled)
    to_num_sampled[n:].zero_()
    to_start_positions[:n].copy_(start_positions)
    to_aux_hidden[: aux_hidden.shape[0]].copy_(aux_hidden)
    to_block_table[:n, :width].copy_(block_table)
    to_block_table[:n, width:].fill_(NULL_BLOCK)

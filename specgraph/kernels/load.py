"""From what the engine hands over to the drafter's persistent buffers, as one op."""

from __future__ import annotations

from torch import Tensor

from specgraph.kernels.library import define
from specgraph.kernels.slots import NULL_BLOCK


def load_round_reference(
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    start_positions: Tensor,
    aux_hidden: Tensor,
    block_table: Tensor,
    to_sampled_token_ids: Tensor,
    to_num_sampled: Tensor,
    to_start_positions: Tensor,
    to_aux_hidden: Tensor,
    to_block_table: Tensor,
) -> None:
    """Copies, on any device."""
    n, width = block_table.shape
    to_sampled_token_ids[:n].copy_(sampled_token_ids)
    to_num_sampled[:n].copy_(num_sampled)
    to_num_sampled[n:].zero_()
    to_start_positions[:n].copy_(start_positions)
    to_aux_hidden[: aux_hidden.shape[0]].copy_(aux_hidden)
    to_block_table[:n, :width].copy_(block_table)
    to_block_table[:n, width:].fill_(NULL_BLOCK)


_load_round_op = define(
    "load_round(Tensor sampled_token_ids, Tensor num_sampled, Tensor start_positions, Tensor aux_hidden,"
    " Tensor block_table, Tensor(a!) to_sampled_token_ids, Tensor(b!) to_num_sampled, Tensor(c!) to_start_positions,"
    " Tensor(d!) to_aux_hidden, Tensor(e!) to_block_table) -> ()",
    reference=load_round_reference,
)


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
    """Write a round of n requests over the first n of the R requests in the buffers; later ones become inert.

    Args:
        sampled_token_ids: int64 [n, q]; num_sampled int32 [n]; start_positions int64 [n].
        aux_hidden: [n * q, aux_size].
        block_table: int32 [n, b]; columns after b are filled with the null block.
        to_sampled_token_ids: [R, q], to_num_sampled [R], to_start_positions [R], to_aux_hidden [R * q, aux_size],
            to_block_table [R, max_blocks]: written.
    """
    _load_round_op(
        sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids,
        to_num_sampled, to_start_positions, to_aux_hidden, to_block_table,
    )  # fmt: skip

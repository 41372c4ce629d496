"""Positions to KV slots, and moving one-row-per-request metadata forward inside a graph.

The contract that keeps padded rows harmless: a request with seq_len 0 is inert and stays so; a position at or past
max_model_len, or in the null block, has slot -1 and is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.library import define

NULL_SLOT = -1
"""A slot that is never written: padded rows and positions past max_model_len."""

NULL_BLOCK = 0
"""The block that no request owns. Block tables are filled up with it, so reading past a request's end is harmless."""


def slots_of(positions: Tensor, block_table: Tensor, valid: Tensor, max_model_len: int, block_size: int) -> Tensor:
    """KV slots of unclamped positions.

    Args:
        positions: int64 [R, q].
        block_table: int32 [R, max_blocks].
        valid: bool [R, q] or [R, 1].

    Returns:
        int64 [R, q], NULL_SLOT where not valid, past max_model_len, or in the null block.
    """
    inside = valid & (positions < max_model_len) & (positions >= 0)
    index = (positions.clamp(0, max_model_len - 1) // block_size).clamp(max=block_table.shape[1] - 1)
    block = block_table.gather(1, index).long()
    return torch.where(inside & (block != NULL_BLOCK), block * block_size + positions % block_size, NULL_SLOT)


def _advance(
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    draft_step: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
) -> None:
    live = seq_lens > 0
    seq_lens.add_(live)
    position = seq_lens.long() - 1
    slots = slots_of(position[:, None], block_table, live[:, None], max_model_len, block_size)
    slot_mapping.copy_(slots[:, 0])
    positions.copy_(position.clamp(0, max_model_len - 1))
    draft_step.add_(1)


_advance_op = define(
    "advance(Tensor(a!) seq_lens, Tensor(b!) positions, Tensor(c!) slot_mapping, Tensor(d!) draft_step,"
    " Tensor block_table, int max_model_len, int block_size) -> ()",
    reference=_advance,
)


def advance(
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    draft_step: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
) -> None:
    """Move every live request one token on, in place; inert ones stay inert. Adds 1 to `draft_step`.

    Args:
        seq_lens: int32 [R], 0 for inert requests.
        positions: int64 [R], clamped to max_model_len - 1.
        slot_mapping: int64 [R].
        draft_step: int64 [1].
        block_table: int32 [R, max_blocks].
    """
    _advance_op(seq_lens, positions, slot_mapping, draft_step, block_table, max_model_len, block_size)

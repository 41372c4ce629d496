"""The first node of a captured prefill: rows of one prompt, padded to the size that was captured."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.library import define
from specgraph.kernels.slots import slots_of


def _begin_prefill(
    first_position: Tensor,
    num_rows: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    last_row: Tensor,
) -> None:
    rows = positions.shape[0]
    offset = torch.arange(rows, device=positions.device)
    raw = first_position + offset
    positions.copy_(raw.clamp(0, max_model_len - 1))
    known = (offset < num_rows)[None]
    slot_mapping.copy_(slots_of(raw[None], block_table, known, max_model_len, block_size)[0])
    # As many keys as if every row were real: row i then sees first_position + i + 1 of them, whatever the padding.
    seq_lens.copy_(torch.where(num_rows > 0, first_position + rows, 0))
    last_row.copy_((num_rows - 1).clamp(min=0))


_begin_prefill_op = define(
    "begin_prefill(Tensor first_position, Tensor num_rows, Tensor block_table, int max_model_len, int block_size,"
    " Tensor(a!) positions, Tensor(b!) slot_mapping, Tensor(c!) seq_lens, Tensor(d!) last_row) -> ()",
    reference=_begin_prefill,
)


def begin_prefill(
    first_position: Tensor,
    num_rows: Tensor,
    block_table: Tensor,
    *,
    max_model_len: int,
    block_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    last_row: Tensor,
) -> None:
    """Fill T rows of one request, of which the first `num_rows` are a prompt's and the others write no KV.

    Args:
        first_position: int64 [1]: position of row 0.
        num_rows: int64 [1]: real rows; 0 makes the pass inert.
        block_table: int32 [1, max_blocks], filled up with the null block for T tokens past max_model_len.
        positions, slot_mapping: int64 [T], written.
        seq_lens: int32 [1], written: first_position + T, so that bottom-right causal attention fits the real rows.
        last_row: int64 [1], written: the last real row.
    """
    _begin_prefill_op(
        first_position, num_rows, block_table, max_model_len, block_size, positions, slot_mapping, seq_lens, last_row
    )

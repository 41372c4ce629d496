"""Launching the Triton kernels of drafters with one module per step."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specgraph import ops
from specgraph.ops.triton import past_rows
from specgraph.ops.triton.launch import Launcher, contiguous_rows, power_of_two

_CHUNK = 2048
"""Elements of a hidden state that a program moves at a time."""


@dataclass(frozen=True, slots=True)
class PastRowOps(Launcher):
    """Implementations of the ops in `specgraph.ops.past_rows`, and of `shift_token_ids`."""

    def begin_modules(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, block_table: Tensor,
        round_hidden: Tensor, *, past_token_ids: Tensor, past_positions: Tensor, past_hidden: Tensor,
        max_model_len: int, block_size: int, token_ids: Tensor, hidden: Tensor, positions: Tensor,
        slot_mapping: Tensor, seq_lens: Tensor, last_rows: Tensor, step_seq_lens: Tensor, draft_step: Tensor,
        rows_without_block: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.begin_modules`."""
        sampled_token_ids, round_hidden = contiguous_rows(sampled_token_ids), contiguous_rows(round_hidden)
        requests, query_len = sampled_token_ids.shape
        rows, size = token_ids.shape[0] // requests, hidden.shape[1]
        past_rows.begin_modules_kernel[(requests, rows)](
            sampled_token_ids, num_sampled.contiguous(), start_positions.contiguous(), block_table, round_hidden,
            past_token_ids, past_positions, past_hidden, token_ids, hidden, positions, slot_mapping, seq_lens,
            last_rows, step_seq_lens, draft_step, rows_without_block, query_len, rows - query_len, size,
            sampled_token_ids.stride(0), round_hidden.stride(0), block_table.stride(0), block_table.shape[1],
            max_model_len, KEPT=past_positions.shape[1], BLOCK=block_size,
            WIDTH=power_of_two(max(rows - query_len, query_len)), CHUNK=min(_CHUNK, power_of_two(size)), num_warps=4,
            **self.common(),
        )  # fmt: skip

    def keep_rows(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, slot_mapping: Tensor, past_token_ids: Tensor,
        past_positions: Tensor, past_hidden: Tensor, block_size: int,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.keep_rows`."""
        hidden, size = contiguous_rows(hidden), hidden.shape[1]
        past_rows.keep_rows_kernel[(token_ids.shape[0],)](
            token_ids.contiguous(), hidden, positions.contiguous(), slot_mapping.contiguous(), past_token_ids,
            past_positions, past_hidden, token_ids.shape[0], size, hidden.stride(0), KEPT=past_positions.shape[1],
            BLOCK=block_size, CHUNK=min(_CHUNK, power_of_two(size)), num_warps=4, **self.common(),
        )  # fmt: skip

    def shift_token_ids(
        self, token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor
    ) -> None:
        """See `specgraph.ops.shift_token_ids`."""
        if not all(tensor.is_contiguous() for tensor in (token_ids, last_rows, latest, seq_lens)):
            ops.shift_token_ids.reference(token_ids, last_rows, latest, seq_lens, draft_step)
            return
        rows = token_ids.shape[0] // last_rows.shape[0]
        past_rows.shift_token_ids_kernel[(last_rows.shape[0],)](
            token_ids, last_rows, latest, seq_lens, draft_step, rows, WIDTH=power_of_two(rows), num_warps=1,
            **self.common(),
        )  # fmt: skip

"""Launching the Triton kernels for the first op of a pass, `advance`, and copies of rows."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specgraph import ops
from specgraph.ops.triton import begin
from specgraph.ops.triton import rows as row_kernels
from specgraph.ops.triton.launch import Launcher, ceil_div, contiguous_rows, power_of_two


@dataclass(frozen=True, slots=True)
class RowOps(Launcher):
    """Implementations of the ops in `specgraph.ops.begin`, `copies`, `round_state` and `slots`."""

    def take_rows(self, source: Tensor, rows: Tensor | None, out: Tensor) -> None:
        """See `specgraph.ops.take_rows`."""
        if source.stride(1) != 1 or out.stride(1) != 1:
            out.copy_(source if rows is None else source[rows])
        elif out.shape[0]:
            row_kernels.take_rows_kernel[(out.shape[0],)](
                source, rows, out, out.shape[1], source.stride(0), out.stride(0), CHOSEN=rows is not None,
                WIDTH=power_of_two(out.shape[1]), num_warps=8, **self.common(),
            )  # fmt: skip

    def load_round(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, aux_hidden: Tensor,
        block_table: Tensor, *, to_sampled_token_ids: Tensor, to_num_sampled: Tensor, to_start_positions: Tensor,
        to_aux_hidden: Tensor, to_block_table: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.load_round`."""
        whole = (sampled_token_ids, num_sampled, start_positions, aux_hidden, to_sampled_token_ids, to_aux_hidden,
                 to_block_table)  # fmt: skip
        if block_table.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
            ops.load_round.reference(
                sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table,
                to_sampled_token_ids=to_sampled_token_ids, to_num_sampled=to_num_sampled,
                to_start_positions=to_start_positions, to_aux_hidden=to_aux_hidden, to_block_table=to_block_table,
            )  # fmt: skip
            return
        n, query_len = sampled_token_ids.shape
        elements, chunk = query_len * aux_hidden.shape[1], 8192
        self.launch_again(
            row_kernels.load_round_kernel,
            (to_num_sampled.shape[0], 1 + ceil_div(elements, chunk), 1),
            (sampled_token_ids, num_sampled, start_positions, aux_hidden, block_table, to_sampled_token_ids,
             to_num_sampled, to_start_positions, to_aux_hidden, to_block_table),
            (n, query_len, block_table.shape[1], to_block_table.shape[1], elements, block_table.stride(0)),
            {"ROW": power_of_two(query_len), "TABLE": power_of_two(to_block_table.shape[1]),
             "CHUNK": chunk},
            num_warps=4,
        )  # fmt: skip

    def begin_propose(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, block_table: Tensor,
        *, max_model_len: int, block_size: int, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor,
        seq_lens: Tensor, last_rows: Tensor, step_positions: Tensor, step_seq_lens: Tensor, draft_step: Tensor,
        later_rows: int = 0, rows_without_block: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.begin_propose`."""
        sampled_token_ids = contiguous_rows(sampled_token_ids)
        requests, query_len = sampled_token_ids.shape
        begin.begin_propose_kernel[(requests,)](
            sampled_token_ids, num_sampled.contiguous(), start_positions.contiguous(), block_table, token_ids,
            positions, slot_mapping,
            seq_lens, last_rows, step_positions, step_seq_lens, draft_step, rows_without_block, query_len, later_rows,
            sampled_token_ids.stride(0), block_table.stride(0), block_table.shape[1], max_model_len, BLOCK=block_size,
            WIDTH=power_of_two(query_len), COUNTED=power_of_two(query_len + later_rows), num_warps=1, **self.common(),
        )  # fmt: skip

    def begin_block(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, start_positions: Tensor, block_table: Tensor,
        *, mask_token_id: int, max_model_len: int, block_size: int, context_positions: Tensor, context_slots: Tensor,
        token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor,
        rows_without_block: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.begin_block`."""
        sampled_token_ids = contiguous_rows(sampled_token_ids)
        requests, query_len = sampled_token_ids.shape
        length = positions.shape[0] // requests
        begin.begin_block_kernel[(requests,)](
            sampled_token_ids, num_sampled.contiguous(), start_positions.contiguous(), block_table, context_positions,
            context_slots, token_ids, positions, slot_mapping, seq_lens, rows_without_block, query_len, length,
            sampled_token_ids.stride(0), block_table.stride(0), block_table.shape[1], mask_token_id, max_model_len,
            BLOCK=block_size, WIDTH=power_of_two(query_len), LENGTH=power_of_two(length),
            COUNTED=power_of_two(query_len + length), num_warps=1, **self.common(),
        )  # fmt: skip

    def begin_verify(
        self, last_token_ids: Tensor, draft_token_ids: Tensor, start_positions: Tensor, block_table: Tensor,
        *, max_model_len: int, block_size: int, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor,
        seq_lens: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.begin_verify`."""
        draft_token_ids = contiguous_rows(draft_token_ids)
        query_len = draft_token_ids.shape[1] + 1
        begin.begin_verify_kernel[(last_token_ids.shape[0],)](
            last_token_ids.contiguous(), draft_token_ids, start_positions.contiguous(), block_table, token_ids,
            positions, slot_mapping,
            seq_lens, query_len, draft_token_ids.stride(0), block_table.stride(0), block_table.shape[1],
            max_model_len, BLOCK=block_size, WIDTH=power_of_two(query_len), num_warps=1, **self.common(),
        )  # fmt: skip

    def advance(
        self, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.advance`."""
        begin.advance_kernel[(1,)](
            seq_lens, positions, slot_mapping, draft_step, block_table, seq_lens.shape[0], block_table.stride(0),
            block_table.shape[1], max_model_len, BLOCK=block_size,
            REQUESTS=power_of_two(seq_lens.shape[0]), num_warps=1, **self.common(),
        )  # fmt: skip

    def stop_finished(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, remaining: Tensor, stop_token_ids: Tensor
    ) -> None:
        """See `specgraph.ops.stop_finished`."""
        if not all(t.is_contiguous() for t in (num_sampled, remaining, stop_token_ids)):
            ops.stop_finished.reference(sampled_token_ids, num_sampled, remaining, stop_token_ids)
            return
        sampled_token_ids = contiguous_rows(sampled_token_ids)
        requests, query_len = sampled_token_ids.shape
        row_kernels.stop_finished_kernel[(requests,)](
            sampled_token_ids, num_sampled, remaining, stop_token_ids, query_len, sampled_token_ids.stride(0),
            stop_token_ids.shape[1], WIDTH=power_of_two(query_len), STOPS=power_of_two(stop_token_ids.shape[1]),
            num_warps=1, **self.common(),
        )  # fmt: skip

    def next_verify(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, draft_token_ids: Tensor, start_positions: Tensor,
        last_token_ids: Tensor, to_draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.next_verify`."""
        written = (num_sampled, start_positions, last_token_ids, to_draft_token_ids)
        if not all(tensor.is_contiguous() for tensor in written):
            ops.next_verify.reference(sampled_token_ids, num_sampled, draft_token_ids, *written[1:])
            return
        sampled_token_ids, draft_token_ids = contiguous_rows(sampled_token_ids), contiguous_rows(draft_token_ids)
        drafts = draft_token_ids.shape[1]
        row_kernels.next_verify_kernel[(num_sampled.shape[0],)](
            sampled_token_ids, num_sampled, draft_token_ids, start_positions, last_token_ids, to_draft_token_ids,
            drafts, sampled_token_ids.stride(0), draft_token_ids.stride(0), WIDTH=power_of_two(max(drafts, 1)),
            num_warps=1, **self.common(),
        )  # fmt: skip

    def publish_round(
        self, results: Tensor, sampled_token_ids: Tensor, num_sampled: Tensor, remaining: Tensor,
        stop_token_ids: Tensor, ring: Tensor, progress: Tensor, again: Tensor, rounds_per_launch: int,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.publish_round`."""
        read = (results, num_sampled, remaining, stop_token_ids)
        if not all(tensor.is_contiguous() for tensor in (*read, ring)):
            ops.publish_round.reference(
                results, sampled_token_ids, num_sampled, remaining, stop_token_ids, ring, progress, again,
                rounds_per_launch,
            )  # fmt: skip
            return
        sampled_token_ids = contiguous_rows(sampled_token_ids)
        requests, query_len = sampled_token_ids.shape
        row_kernels.publish_round_kernel[(1,)](
            results, sampled_token_ids, num_sampled, remaining, stop_token_ids, ring, progress, again, requests,
            query_len, sampled_token_ids.stride(0), stop_token_ids.shape[1], results.shape[0], ring.shape[0],
            rounds_per_launch, REQUESTS=power_of_two(requests), WIDTH=power_of_two(query_len), CHUNK=1024, num_warps=4,
            **self.common(),
        )  # fmt: skip

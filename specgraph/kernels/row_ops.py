"""Launching the Triton kernels for rows: the first op of a pass, moving on between steps and rounds, and copies."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from torch import Tensor

from specgraph.kernels import begin_rows as begin
from specgraph.kernels import ngram
from specgraph.kernels import past_rows as kept_rows
from specgraph.kernels import rows as row_kernels
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.copies import BatchTensors
from specgraph.ops.past_rows import PastRows

_CHUNK = 2048
"""Elements of a hidden state that a program moves at a time."""


class RowOps(Launcher):
    """Implementations of the ops in `specgraph.ops.begin_rows`, `past_rows`, `copies`, `ngram` and `slots`."""

    __slots__ = ()

    def begin_rows(self, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None) -> None:
        requests, table = given.block_table.shape[0], given.block_table
        of_rows = (given.token_ids, given.draft_token_ids, given.draft_parents, given.hidden)
        tokens, drafts, parents, hidden = (None if t is None else contiguous_rows(t) for t in of_rows)
        columns = 0 if tokens is None else tokens.shape[1]
        num_last = 0 if rows.last_rows is None else rows.last_rows.shape[0] // requests
        size = 0 if past is None else past.hidden.shape[2]
        self.launch(
            begin.begin_rows_kernel, (requests, 1 if past is None else plan.rows),
            given.start_positions.contiguous(), table,
            None if given.num_sampled is None else given.num_sampled.contiguous(), tokens, drafts, parents, hidden,
            *rows, *(past or (None, None, None)), plan.rows, plan.past, plan.later_rows, plan.filler,
            plan.position_offset, plan.tree_steps, plan.max_model_len, columns, num_last, size, table.stride(0),
            table.shape[1], *(0 if t is None else t.stride(0) for t in (tokens, drafts, parents, hidden)),
            BLOCK=plan.block_size, AFTER_SAMPLED=plan.after_sampled, SLOTS_OF_REJECTED=plan.slots_of_rejected,
            ROWS=power_of_two(plan.rows), COLUMNS=power_of_two(columns), LAST=power_of_two(num_last),
            COUNTED=power_of_two(columns + plan.later_rows), KEPT=1 if past is None else past.positions.shape[1],
            CHUNK=min(_CHUNK, power_of_two(size)), num_warps=1 if past is None and plan.rows <= 128 else 4,
        )  # fmt: skip

    def keep_rows(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, slot_mapping: Tensor, past: PastRows,
        block_size: int,
    ) -> None:  # fmt: skip
        hidden, size = contiguous_rows(hidden), hidden.shape[1]
        self.launch(
            kept_rows.keep_rows_kernel, (token_ids.shape[0],),
            token_ids.contiguous(), hidden, positions.contiguous(), slot_mapping.contiguous(), *past,
            token_ids.shape[0], size, hidden.stride(0), KEPT=past.positions.shape[1], BLOCK=block_size,
            CHUNK=min(_CHUNK, power_of_two(size)), num_warps=4,
        )  # fmt: skip

    def keep_tokens(self, token_ids: Tensor, slot_mapping: Tensor, history: Tensor) -> None:
        rows, at_once = token_ids.shape[0], 128
        self.launch(
            ngram.keep_tokens_kernel, (ceil_div(rows, at_once),),
            token_ids.contiguous(), slot_mapping.contiguous(), history, rows, ROWS=at_once, num_warps=4,
        )  # fmt: skip

    def ngram_propose(
        self, history: Tensor, block_table: Tensor, seq_lens: Tensor, prompt_lookup_min: int, prompt_lookup_max: int,
        max_model_len: int, draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        requests, drafts = draft_token_ids.shape
        if draft_token_ids.stride(1) != 1 or block_table.stride(1) != 1:
            return NotImplemented
        self.launch(
            ngram.ngram_propose_kernel, (requests,),
            history, block_table, seq_lens.contiguous(), draft_token_ids, block_table.stride(0),
            draft_token_ids.stride(0), max_model_len, drafts, MIN=prompt_lookup_min, MAX=prompt_lookup_max,
            BLOCK=history.shape[1], PLACES=1024, DRAFTS=power_of_two(drafts), num_warps=8,
        )  # fmt: skip

    def shift_token_ids(
        self, token_ids: Tensor, last_rows: Tensor, latest: Tensor, seq_lens: Tensor, draft_step: Tensor
    ) -> None:
        if not all(tensor.is_contiguous() for tensor in (token_ids, last_rows, latest, seq_lens)):
            return NotImplemented
        rows = token_ids.shape[0] // last_rows.shape[0]
        self.launch(
            kept_rows.shift_token_ids_kernel, (last_rows.shape[0],),
            token_ids, last_rows, latest, seq_lens, draft_step, rows, WIDTH=power_of_two(rows), num_warps=1,
        )  # fmt: skip

    def advance(
        self, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor, block_table: Tensor,
        max_model_len: int, block_size: int,
    ) -> None:  # fmt: skip
        self.launch(
            begin.advance_kernel, (1,),
            seq_lens, positions, slot_mapping, draft_step, block_table, seq_lens.shape[0], block_table.stride(0),
            block_table.shape[1], max_model_len, BLOCK=block_size,
            REQUESTS=power_of_two(seq_lens.shape[0]), num_warps=1,
        )  # fmt: skip

    def take_rows(self, source: Tensor, rows: Tensor | None, out: Tensor) -> None:
        if source.stride(1) != 1 or out.stride(1) != 1:
            return NotImplemented
        if out.shape[0]:
            self.launch(
                row_kernels.take_rows_kernel, (out.shape[0],),
                source, rows, out, out.shape[1], source.stride(0), out.stride(0),
                WIDTH=power_of_two(out.shape[1]), num_warps=8,
            )  # fmt: skip

    def load_round(self, given: BatchTensors, to: BatchTensors) -> None:
        whole = (*given[:4], to.sampled_token_ids, to.aux_hidden, to.block_table)
        if given.block_table.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
            return NotImplemented
        n, query_len = given.sampled_token_ids.shape
        elements, chunk = query_len * given.aux_hidden.shape[1], 8192
        width, to_width = given.block_table.shape[1], to.block_table.shape[1]
        self.launch_again(
            row_kernels.load_round_kernel,
            (to.num_sampled.shape[0], 1 + ceil_div(elements, chunk), 1),
            (*given, *to),
            (n, query_len, width, to_width, elements, given.block_table.stride(0)),
            {"ROW": power_of_two(query_len), "TABLE": power_of_two(to_width), "CHUNK": chunk},
            num_warps=4,
        )

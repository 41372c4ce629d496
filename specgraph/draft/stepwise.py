"""The stepwise program: each step runs a module of its own (MTP with several modules)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata, HostLengths
from specgraph.capture import AttentionStack, MakeAttend, StepKind
from specgraph.draft.buffers import DraftBuffers, PassRows
from specgraph.draft.config import DraftConfig
from specgraph.draft.host_lengths import HostRound
from specgraph.draft.past_rows import PastRows, allocate_past_rows, num_entries
from specgraph.draft.program import DraftProgram, begin_rows, draft_one
from specgraph.draft.round import RoundBuffers
from specgraph.models.protocol import StepwiseHead


class StepwiseProgram(DraftProgram[StepwiseHead]):
    """Every step by a module of its own, over all rows of the target's round and the K - 1 positions before it, whose
    keys in later modules are those of drafted tokens. So each module's KV is that of the text (`PastRows`)."""

    step_kind: StepKind = "distinct"

    def __init__(self, head: StepwiseHead, stack: AttentionStack, config: DraftConfig, memory: RoundBuffers) -> None:
        """See `DraftProgram`."""
        super().__init__(head, stack, config, memory)
        self.past: PastRows | None = None
        """None where only one module is used: its rows take no drafted token."""
        if self.look_ahead:
            entries, blocks = num_entries(self.prefill_passes, config.block_size), stack.caches[0].key.shape[0]
            self.past = allocate_past_rows(blocks, entries, head.hidden_size, head.dtype, memory.seeds.device)

    @property
    def prefill_passes(self) -> int:
        """One for each module that is used."""
        return self.config.num_speculative_tokens

    def passes(self, num_speculative_tokens: int) -> int:
        """One for each module that is used at any K: those past the K-th write KV, for later rounds that draft more."""
        return self.config.num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """The past rows and all rows of the round, in every step."""
        rows = query_len + self.look_ahead
        return PassRows(rows, later=1, carried=rows, past=self.look_ahead)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> Tensor:
        """See `DraftProgram.first`."""
        hidden = self.head.combine(b.inputs.aux_hidden)
        if self.past is None:
            begin_rows(b, self.config)
            return self._module(0, b, hidden, make_attend)
        ops.begin_modules(
            b.inputs.sampled_token_ids,
            b.inputs.num_sampled,
            b.inputs.start_positions,
            b.inputs.block_table,
            hidden,
            past_token_ids=self.past.token_ids,
            past_positions=self.past.positions,
            past_hidden=self.past.hidden,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            token_ids=b.token_ids,
            hidden=b.hidden,
            positions=b.first.positions,
            slot_mapping=b.first.slot_mapping,
            seq_lens=b.first.seq_lens,
            last_rows=b.last_rows,
            step_seq_lens=b.step.seq_lens,
            draft_step=b.draft_step,
            rows_without_block=b.round.rows_without_block,
        )
        self._keep(self.past, b.token_ids, b.hidden, b.first)
        return self._module(0, b, b.hidden, make_attend)

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        """See `DraftProgram.step`."""
        ops.shift_token_ids(b.token_ids, b.last_rows, b.step_token_ids, b.step.seq_lens, b.draft_step)
        return self._module(step, b, b.hidden, make_attend)

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """See `DraftProgram.prefill`. Module k takes the token k places further; past the last one, the last token."""
        hidden, rows = self.head.combine(aux_hidden), aux_hidden.shape[0]
        unknown = rows + self.look_ahead - token_ids.shape[0]
        if unknown > 0:
            token_ids = torch.cat((token_ids, token_ids[-1:].expand(unknown)))
        if self.past is not None:
            self._keep(self.past, token_ids[:rows], hidden, metadata)
        for module in range(self.prefill_passes):
            ids = token_ids[module : module + rows]
            hidden = self.head.forward_step(module, ids, hidden, make_attend(metadata, module)).carry

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. The same at every step; accepted counts are not needed."""
        rows = host_round.query_len + self.look_ahead
        begins = [max(start - self.look_ahead, 0) for start in host_round.start_positions]
        return host_round.lengths(rows, [begin + rows for begin in begins])

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The buffers, and what is kept of past rows."""
        return {**super().named_tensors(), **({} if self.past is None else self.past.named_tensors())}

    def _keep(self, past: PastRows, token_ids: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> None:
        rows = (token_ids, hidden, metadata.positions, metadata.slot_mapping)
        ops.keep_rows(*rows, past.token_ids, past.positions, past.hidden, self.config.block_size)

    def _module(self, step: int, b: DraftBuffers, hidden: Tensor, make_attend: MakeAttend) -> Tensor:
        out = self.head.forward_step(step, b.token_ids, hidden, make_attend(b.first, step))
        if step < b.draft_token_ids.shape[1]:
            draft_one(self.head, b, out.hidden[b.last_rows])
        return out.carry

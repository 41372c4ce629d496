"""The program of a head with one module a step (MTP with several modules)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionMetadata, HostLengths
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import HostRound
from specgraph.drafting.program import begin_rows, draft_one
from specgraph.graphs import MakeAttend
from specgraph.models.protocol import DraftHead, StepwiseHead


class ModuleHead(StepwiseHead, DraftHead):
    """A `DraftHead` with a module for each step."""


@dataclass(frozen=True, slots=True)
class StepwiseProgram:
    """Every step over all rows of the target's round, by a module of its own, so that each module's KV is complete."""

    head: ModuleHead
    config: DraftConfig
    steps_differ: bool = True

    @property
    def prefill_steps(self) -> int:
        """One a module that is used."""
        return self.config.num_speculative_tokens

    def num_steps(self, num_speculative_tokens: int) -> int:
        """K: one module each."""
        return num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """All rows of the round in every step."""
        return PassRows(query_len, later=1, carried=query_len)

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        begin_rows(buffers, self.config.max_model_len, self.config.block_size)
        self._module(0, buffers, self.head.combine(buffers.aux_hidden), make_attend)

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """See `DraftProgram.step`."""
        kernels.shift_token_ids(
            buffers.token_ids, buffers.last_rows, buffers.step_token_ids, buffers.step.seq_lens, buffers.draft_step
        )
        self._module(step, buffers, buffers.hidden, make_attend)

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """See `DraftProgram.prefill`. A module's last rows look past the tokens given: there the last one stands in."""
        hidden = self.head.combine(aux_hidden)
        row = torch.arange(token_ids.shape[0], device=token_ids.device)
        last = row[-1:] if last_row is None else last_row
        for module in range(self.prefill_steps):
            ids = token_ids[torch.minimum(row + module, last)]
            hidden = self.head.forward_step(module, ids, hidden, make_attend(metadata, module)).carry

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. The same at every step, and without accepted counts."""
        return host_round.first()

    def _module(self, step: int, buffers: DraftBuffers, hidden: Tensor, make_attend: MakeAttend) -> None:
        out = self.head.forward_step(step, buffers.token_ids, hidden, make_attend(buffers.first, step))
        kernels.take_rows(out.carry, None, buffers.hidden)
        draft_one(self.head, buffers, out.hidden[buffers.last_rows])

"""The stepwise program: each step runs a module of its own (MTP with several modules)."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionMetadata, HostLengths
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.host_lengths import HostRound
from specgraph.drafting.program import DraftProgram, begin_rows, draft_one
from specgraph.graphs import MakeAttend
from specgraph.models.protocol import DraftHead, StepwiseHead
from specgraph.runner import StepKind


class ModuleHead(StepwiseHead, DraftHead):
    """A `DraftHead` with a module for each step."""


class StepwiseProgram(DraftProgram[ModuleHead]):
    """Every step over all rows of the target's round, by a module of its own, so that each module's KV is complete."""

    step_kind: StepKind = "distinct"

    @property
    def prefill_passes(self) -> int:
        """One for each module that is used."""
        return self.config.num_speculative_tokens

    def passes(self, num_speculative_tokens: int) -> int:
        """One for each module that is used at any K: those past the K-th write KV, for later rounds that draft more."""
        return self.config.num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """All rows of the round in every step."""
        return PassRows(query_len, later=1, carried=query_len)

    def first(self, b: DraftBuffers, make_attend: MakeAttend) -> Tensor:
        """See `DraftProgram.first`."""
        begin_rows(b, self.config)
        return self._module(0, b, self.head.combine(b.inputs.aux_hidden), make_attend)

    def step(self, b: DraftBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        """See `DraftProgram.step`."""
        kernels.shift_token_ids(b.token_ids, b.last_rows, b.step_token_ids, b.step.seq_lens, b.draft_step)
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
        for module in range(self.prefill_passes):
            ids = token_ids[module : module + rows]
            hidden = self.head.forward_step(module, ids, hidden, make_attend(metadata, module)).carry

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. The same at every step; accepted counts are not needed."""
        return host_round.first()

    def _module(self, step: int, b: DraftBuffers, hidden: Tensor, make_attend: MakeAttend) -> Tensor:
        out = self.head.forward_step(step, b.token_ids, hidden, make_attend(b.first, step))
        if step < b.draft_token_ids.shape[1]:
            draft_one(self.head, b, out.hidden[b.last_rows])
        return out.carry
